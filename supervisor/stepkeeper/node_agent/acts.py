"""What the agent does: each call on a thread of its own, with a time limit, answered by an event."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from stepkeeper.node_agent.core import effects as do
from stepkeeper.node_agent.core import events as on
from stepkeeper.node_agent.fitness import Fitness
from stepkeeper.node_agent.service import Inbox
from stepkeeper.slurm.client import SlurmError
from stepkeeper.slurm.nodes import JobsHere, NodeClient, NodeFacts

WRONG = (SlurmError, ValueError)  # ValueError: an answer that this version cannot read


class LocalClient(NodeClient, Protocol):
    """What the agent asks of Slurm, the node's own slurmstepds included."""

    def jobs_here(self, name: str) -> JobsHere:
        """Return the jobs on this node and their owners, without a call to the controller."""
        ...


class Acts:
    """Carries out effects.  `check` and `reset` are the agent's own: both look at GPUs.

    `noted` waits until the ledger holds all that was decided, and says what is wrong where it does not.
    `mistaken` says why a node of Slurm's is not this machine, "" where it may be.
    """

    def __init__(
        self,
        node: str,
        client: LocalClient,
        inbox: Inbox,
        *,
        check: Callable[[], Fitness],
        reset: Callable[[Sequence[str]], str],
        noted: Callable[[], str],
        mistaken: Callable[[NodeFacts], str],
    ) -> None:
        self._node = node
        self._client = client
        self._inbox = inbox
        self._check = check
        self._reset = reset
        self._noted = noted
        self._mistaken = mistaken

    def list_jobs(self, effect: do.ListJobs) -> None:
        """Ask who is on the node; `JobsListed` comes."""

        def work() -> None:
            try:
                here, error = self._client.jobs_here(self._node), ""
            except WRONG as failure:
                here, error = JobsHere(), str(failure)
            self._inbox.put(
                on.JobsListed(at=self._now(), incident=effect.incident, jobs=here.jobs, uids=here.uids, error=error)
            )

        self._inbox.run_optional(
            "jobs", work, answer=lambda error: on.JobsListed(at=self._now(), incident=effect.incident, error=error)
        )

    def ask_nodes(self, effect: do.AskNodes) -> None:
        """Ask Slurm about the node and its peers; `NodesAnswered` comes."""

        def work() -> None:
            nodes: tuple[NodeFacts, ...] = ()
            error, began, size = "", time.monotonic(), 0
            try:
                nodes = (self._client.node(self._node),) if effect.alone else self._client.peers(self._node)
            except WRONG as failure:
                error = str(failure)
            took_s = time.monotonic() - began
            if effect.alone and nodes and took_s >= effect.crowded_s:
                size = self._cluster_size()
            own = next((each for each in nodes if each.name == self._node), None)
            if own is not None and (error := self._mistaken(own)):
                nodes = ()  # nothing may be done to another machine's node
            self._inbox.put(
                on.NodesAnswered(
                    at=self._now(),
                    call=effect.call,
                    nodes=nodes,
                    alone=effect.alone,
                    took_s=took_s,
                    cluster_size=size,
                    error=error,
                )
            )

        self._inbox.run_optional(
            "slurm",
            work,
            answer=lambda error: on.NodesAnswered(at=self._now(), call=effect.call, alone=effect.alone, error=error),
        )

    def _cluster_size(self) -> int:
        try:
            return self._client.cluster_size()
        except WRONG:
            return 0  # not known: Slurm is taken for busy, as it seemed

    def drain(self, effect: do.SetDrain) -> None:
        """Drain the node; `CallAnswered` comes, as for all below."""
        self._call(effect.call, lambda: self._client.drain(self._node, effect.reason))

    def resume(self, effect: do.Resume) -> None:
        """Return the node to service."""
        self._call(effect.call, lambda: self._client.resume(self._node), noted=True)

    def reboot(self, effect: do.Reboot) -> None:
        """Have Slurm reboot the node."""
        self._call(effect.call, lambda: self._client.reboot(self._node, effect.reason), noted=True)

    def reset_gpus(self, effect: do.ResetGpus) -> None:
        """Reset GPUs."""
        self._answer(effect.call, "reset", lambda: self._reset(effect.pcis))

    def check_node(self, effect: do.CheckNode) -> None:
        """Look whether the node is fit."""

        def work() -> None:
            found = self._check()
            self._inbox.put(on.CallAnswered(at=self._now(), call=effect.call, error=found.unfit, looked=found.looked))

        self._inbox.run_optional("check", work, answer=lambda error: self._answered(effect.call, error))

    def _call(self, number: int, act: Callable[[], None], *, noted: bool = False) -> None:
        """Make a call; with `noted`, only once the ledger says so: who is killed after it must know of it."""

        def error() -> str:
            if noted and (problem := self._noted()):
                return problem
            try:
                act()
            except WRONG as failure:
                return str(failure)
            return ""

        self._answer(number, "slurm", error)

    def _answer(self, number: int, name: str, act: Callable[[], str]) -> None:
        def work() -> None:
            self._inbox.put(self._answered(number, act()))

        self._inbox.run_optional(name, work, answer=lambda error: self._answered(number, error))

    def _answered(self, number: int, error: str) -> on.CallAnswered:
        return on.CallAnswered(at=self._now(), call=number, error=error)

    def _now(self) -> float:
        return self._inbox.clock.now()


def reset_gpus(pcis: Sequence[str], within_s: float) -> str:
    """Reset GPUs that nobody uses, all in that time; return what went wrong, "" where nothing did."""
    if not pcis:
        return "no GPU's address is known"
    until = time.monotonic() + within_s
    for pci in pcis:
        argv = ["nvidia-smi", "--gpu-reset", "-i", pci]
        try:
            done = subprocess.run(
                argv,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=max(0.1, until - time.monotonic()),
                stdin=subprocess.DEVNULL,
                check=False,
                start_new_session=True,
            )
        except subprocess.TimeoutExpired:
            return f"{' '.join(argv)}: not done in {within_s:g} s"
        except OSError as error:
            return f"{' '.join(argv)}: {error.strerror}"
        if done.returncode:
            said = " ".join((done.stderr or done.stdout).split())[:300]
            return f"{' '.join(argv)}: {said or f'exit code {done.returncode}'}"
    return ""
