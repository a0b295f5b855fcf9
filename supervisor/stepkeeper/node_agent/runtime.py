"""What the agent's loop runs on: its log, systemd, its queue, the sources that fill it, and the acts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import assert_never

import msgspec

from stepkeeper import __version__, loop_tools
from stepkeeper.errors import UsageError
from stepkeeper.log import Log
from stepkeeper.node_agent import evaluate, kernel
from stepkeeper.node_agent.config import NodeConfig
from stepkeeper.node_agent.core import events as on
from stepkeeper.node_agent.core.events import AskNodes, CheckNode, Event, ListJobs, Reboot, ResetGpus, Resume, SetDrain
from stepkeeper.node_agent.core.state import Mode, State
from stepkeeper.node_agent.evaluate import Fitness
from stepkeeper.node_agent.kernel import KernelLog, Position
from stepkeeper.node_agent.nvml import NvmlProcess
from stepkeeper.node_agent.protocol import Seen
from stepkeeper.node_agent.readings import Reading
from stepkeeper.node_agent.server import AgentSocket
from stepkeeper.slurm.client import NodeFacts, SlurmError
from stepkeeper.slurm.nodes import NodeCommands

# The log: JSON lines with constant event names; below systemd each with its priority.


def stdout_is_journal() -> bool:
    """Tell whether our lines go to journald, as systemd says in JOURNAL_STREAM."""
    if sys.stdout is None:  # closed before we started
        return False
    device, _, inode = os.environ.get("JOURNAL_STREAM", "").partition(":")
    try:
        status = os.fstat(sys.stdout.fileno())
    except (OSError, ValueError):
        return False
    return (device, inode) == (str(status.st_dev), str(status.st_ino))


# Words to systemd, the only place that imports `sdnotify`.  Without NOTIFY_SOCKET they go nowhere.


class Systemd:
    """READY, STATUS, WATCHDOG and STOPPING.  The watchdog is fed by the agent's loop, and by nothing else."""

    def __init__(self) -> None:
        """Raises `StepkeeperError` where systemd waits for words and nobody can say them."""
        self._notifier = None
        if os.environ.get("NOTIFY_SOCKET"):
            try:
                import sdnotify  # noqa: PLC0415 - only here, and only below systemd
            except ImportError as error:
                raise UsageError("systemd waits for a word (Type=notify): pip install sdnotify") from error
            self._notifier = sdnotify.SystemdNotifier()
            self._notifier.socket.settimeout(0)  # a systemd that does not listen must not stop the loop
        microseconds = os.environ.get("WATCHDOG_USEC", "")
        for_us = os.environ.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        self.watchdog_every_s = float(microseconds) / 1e6 / 3 if microseconds.isdigit() and for_us else None

    def say(self, **words: str) -> None:
        """Say `READY="1"`, `STATUS="..."` and the like, in one message."""
        if self._notifier is not None:
            text = "\n".join(f"{key}={value}".replace("\n", " ") for key, value in words.items())
            self._notifier.notify(text)


# The one queue between the agent's threads and its loop.

WAITING_MAX = 5000
"""So many readings may wait; then their sensor waits, and the kernel's ring buffer keeps the rest."""
PATIENCE_S = 0.05


class Stop(msgspec.Struct, frozen=True):
    """The agent shall end."""

    why: str


class Do(msgspec.Struct, frozen=True):
    """Something that must happen on the loop's own thread."""

    what: Callable[[], None]


Item = Event | Reading | Stop | Do


class Inbox(loop_tools.Inbox[Item]):
    """Events, readings and words on their way to the loop."""

    def put_patiently(self, item: Item) -> None:
        """Hand over one item of a source that may flood us: wait while the loop is behind."""
        while self._queue.qsize() > WAITING_MAX:
            time.sleep(PATIENCE_S)
        self._queue.put(item)


# SIGTERM and SIGINT end the agent in order.

STOPPING = (signal.SIGTERM, signal.SIGINT)


def listen_for_signals(inbox: Inbox) -> None:
    """Put a `Stop` into the inbox for each such signal.  Once a process, on the main thread."""
    loop_tools.listen_for_signals(STOPPING, lambda number: inbox.put(Stop(why=number.name)), inbox.run_thread)


# The agent's sensors and its socket: started together, stopped together; none of them decides.

CAUGHT_UP_WITHIN_S = 10.0
EVIDENCE_EVERY_S = 60.0


class Sources:
    """Everything that puts readings into the inbox, and the socket to jobs."""

    def __init__(
        self,
        config: NodeConfig,
        state: State,
        *,
        client: NodeCommands,
        on_look: Callable[[], None],
        open_incidents: Callable[[], list[Seen]],
        inbox: Inbox,
        log: Log,
    ) -> None:
        self._config = config
        self._inbox = inbox
        self._kernel_log = KernelLog(
            self._take_line,
            path=config.test.kernel_log,
            resume=Position(boot_id=state.boot_id, sequence=state.known_sequence),
            allow_injected=config.test.allow_injected,
            boot=state.boot_id,
            on_failure=inbox.fail,
        )
        self._evidence = kernel.EvidenceReader(
            inbox.put, every_s=EVIDENCE_EVERY_S, on_failure=lambda error: inbox.failed("evidence", error)
        )
        self._nvml_lock = threading.Lock()
        self._nvml: NvmlProcess | None = None
        self.socket = AgentSocket(
            str(config.socket_path),
            node=config.name,
            acts=config.mode is Mode.ACT,
            client=client,
            on_look=on_look,
            open_incidents=open_incidents,
            log=log,
            version=__version__,
            on_failure=inbox.fail,
        )

    def start(self) -> None:
        """Start all, and wait until the kernel log that is there has been read.

        Raises:
            StepkeeperError: the socket's place is taken or not safe.
        """
        self.socket.start()
        self._kernel_log.start()
        self.resume_nvml()
        self._evidence.start()
        self._kernel_log.caught_up.wait(CAUGHT_UP_WITHIN_S)

    def stop(self) -> None:
        """Stop all, each within its own limit."""
        self.pause_nvml()
        self._kernel_log.stop()
        self._evidence.stop(kernel.ENDS_WITHIN_S)
        self.socket.close()

    def pause_nvml(self) -> None:
        """End the NVML process: while it lives, it holds the GPUs open."""
        with self._nvml_lock:
            if self._nvml is not None:
                self._nvml.stop()
                self._nvml = None

    def resume_nvml(self) -> None:
        """Start the NVML process, if it is wanted."""
        with self._nvml_lock:
            if self._config.test.nvml and self._nvml is None:
                every_s = self._config.test.limits.health_every_s
                self._nvml = NvmlProcess(self._inbox.put, health_every_s=every_s, on_failure=self._inbox.fail)
                self._nvml.start()

    def _take_line(self, reading: Reading) -> None:
        """Pass on what may be a fault: of a thousand other lines none reaches the loop."""
        if evaluate.concerns(reading):
            self._inbox.put_patiently(reading)


# What the agent does: each call on a thread of its own, with a time limit, answered by an event.

WRONG = (SlurmError, ValueError)  # ValueError: an answer that this version cannot read


Act = ListJobs | AskNodes | CheckNode | ResetGpus | SetDrain | Resume | Reboot


class Acts:
    """Carries out effects.  `check` and `reset` are the agent's own: both look at GPUs.

    `noted` waits until the ledger holds all that was decided, and says what is wrong where it does not.
    `mistaken` says why a node of Slurm's is not this machine, "" where it may be.
    """

    def __init__(
        self,
        node: str,
        client: NodeCommands,
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
        self._size = 0  # of the cluster; 0: not known yet

    def learn_size(self) -> None:
        """Ask Slurm how many nodes there are, once: in a crowd of agents that is a question less."""
        if self._size:
            return
        try:
            self._size = self._client.cluster_size()
        except WRONG:
            return  # Slurm is taken for busy, as it seems, and asked again when the size is wanted

    def perform(self, effect: Act) -> None:
        """Begin one; the event that answers it comes."""
        match effect:
            case ListJobs():
                self._list_jobs(effect)
            case AskNodes():
                self._ask_nodes(effect)
            case CheckNode():
                self._call(effect.call, "check", self._check)
            case ResetGpus():
                self._call(effect.call, "reset", lambda: Fitness(unfit=self._reset(effect.pcis)))
            case SetDrain():
                self._call(effect.call, "slurm", lambda: self._client.drain(self._node, effect.reason))
            case Resume():
                self._call(effect.call, "slurm", lambda: self._client.resume(self._node), noted=True)
            case Reboot():
                self._call(effect.call, "slurm", lambda: self._client.reboot(self._node, effect.reason), noted=True)
            case _:
                assert_never(effect)

    def _list_jobs(self, effect: ListJobs) -> None:
        def act() -> on.JobsListed:
            here = self._client.jobs_here(self._node)
            return on.JobsListed(at=self._now(), incident=effect.incident, jobs=here.jobs, uids=here.uids)

        def failed(error: str) -> on.JobsListed:
            return on.JobsListed(at=self._now(), incident=effect.incident, error=error)

        self._inbox.ask("jobs", act, failed, expected=WRONG)

    def _ask_nodes(self, effect: AskNodes) -> None:
        began = time.monotonic()

        def failed(error: str) -> on.NodesAnswered:
            took_s = time.monotonic() - began
            return on.NodesAnswered(at=self._now(), call=effect.call, alone=effect.alone, took_s=took_s, error=error)

        def act() -> on.NodesAnswered:
            nodes = (self._client.node(self._node),) if effect.alone else self._client.peers(self._node)
            took_s = time.monotonic() - began
            own = next((each for each in nodes if each.name == self._node), None)
            if own is not None and (error := self._mistaken(own)):
                return failed(error)  # nothing may be done to another machine's node
            if slow := effect.alone and took_s >= effect.crowded_s:
                self.learn_size()
            size = self._size if slow else 0
            return on.NodesAnswered(
                at=self._now(), call=effect.call, nodes=nodes, alone=effect.alone, took_s=took_s, cluster_size=size
            )

        self._inbox.ask("slurm", act, failed, expected=WRONG)

    def _call(self, number: int, part: str, act: Callable[[], Fitness | None], *, noted: bool = False) -> None:
        """Make a call; with `noted`, only once the ledger says so: who is killed after it must know of it."""

        def answered(error: str = "", looked: on.Looked | None = None) -> on.CallAnswered:
            return on.CallAnswered(at=self._now(), call=number, error=error, looked=looked)

        def called() -> on.CallAnswered:
            if noted and (problem := self._noted()):
                return answered(problem)
            found = act() or Fitness()
            return answered(found.unfit, found.looked)

        self._inbox.ask(part, called, answered, expected=WRONG if part == "slurm" else ())

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
