"""Whether the node is fit for jobs again, by one fresh look at its GPUs.

By the very rules that drain it: a node that is returned must not be drained at the next reading.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import msgspec

from stepkeeper.node_agent.core.events import Looked
from stepkeeper.node_agent.core.plan import pending, waits_for_crowd
from stepkeeper.node_agent.core.state import Drain, Mode, Policy, Repair, State
from stepkeeper.node_agent.sensors import nvml
from stepkeeper.node_agent.sensors.evidence import Roots, gpu_addresses
from stepkeeper.node_agent.sensors.readings import NvmlState
from stepkeeper.node_agent.xid import judge
from stepkeeper.node_agent.xid.catalogue import Action, Catalogue
from stepkeeper_trainer.formats.durable import write_atomically

LOOK_WITHIN_S = 30.0


class Fitness(msgspec.Struct, frozen=True, kw_only=True):
    """What a look has found."""

    unfit: str = ""  # why the node is not fit; "" where every GPU answers and asks for nothing
    looked: Looked | None = None  # None: NVML is not there


def look(catalogue: Catalogue, expected_gpus: int, within_s: float = LOOK_WITHIN_S) -> Fitness:
    """Look at all GPUs, once."""
    look = nvml.once(within_s)
    status = look.status
    if status.state is not NvmlState.READY:
        stuck = Looked(answers=False) if status.state is NvmlState.STUCK else None
        return Fitness(unfit=f"NVML is {status.state.value}: {status.detail}", looked=stuck)
    problems = []
    answering, well = [], []
    listed, on_the_bus = {gpu.pci for gpu in status.gpus}, gpu_addresses(Roots())
    away = [address for address in on_the_bus if address not in listed]
    gone = judge.missing(expected_gpus, len(status.gpus), at=status.at, catalogue=catalogue, gone=away)
    if gone is not None:
        problems.append(gone.why)
    if len(look.health) < len(status.gpus):
        problems.append(f"only {len(look.health)} of {len(status.gpus)} GPUs reported their health")
    for each in look.health:
        if each.silent:
            problems.append(f"GPU {each.pci} does not answer: {'; '.join(each.errors)}")
        found = judge.judge_health(each, None, catalogue=catalogue)
        asks = [f"GPU {each.pci}: {fault.why}" for fault in found if fault.action is not Action.LOG]
        problems += asks
        if not (each.silent or each.lost):
            answering.append(each.pci)
            if not asks:
                well.append(each)
    looked = Looked(
        answering=tuple(answering),
        well=tuple(each.pci for each in well),
        vouched=tuple(each.pci for each in well if each.recovery_action is not None),
        here=tuple(sorted(listed.union(on_the_bus))),
    )
    return Fitness(unfit="; ".join(problems), looked=looked)


# `verdict.json`: whether the node is fit for jobs, for Slurm's hooks, which read this file and ask nobody.
#
# Unfit is only what the agent drains, or will as soon as Slurm answers: a hook that failed where the circuit breaker
# forbids a drain would make Slurm itself drain the node.  For the same reason three more are fit: a node whose drain
# waits because many agents ask Slurm, one that Slurm returned after the reboot that we asked for, until its checks
# say otherwise, and one that has passed them, before it is returned.

VERDICT_NAME = "verdict.json"
REFRESH_S = 60.0
"""The file is written anew this often: hooks take an old one for none."""


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """One line of JSON; `fit` comes first, so that a shell can find it."""

    fit: bool
    updated_at: int  # Unix seconds
    node: str
    mode: Mode
    why: str = ""
    incident: str = ""
    format: int = 1


def verdict(state: State, at: float, policy: Policy) -> Verdict:
    """Return what the hooks shall read."""
    wanted = pending(state)
    fit, why, incident = True, "", ""
    if policy.mode is Mode.ACT:
        if wanted and not waits_for_crowd(state, at):
            why, incident = f"{wanted[0].name} {wanted[0].gpu_label}: {wanted[0].why}", wanted[0].id
            fit = False
        if state.drain is not None:
            why = state.drain.reason
            if fit and (comes_back := _comes_back(state.drain)):
                why = f"{comes_back}: {why}"
            else:
                fit = False
    return Verdict(fit=fit, updated_at=int(at), node=state.node, mode=policy.mode, why=why, incident=incident)


def _comes_back(drain: Drain) -> str:
    """Say why a node that we hold may take jobs any moment; "" where it may not."""
    if drain.passed:
        return "the checks have passed"
    if drain.slurm_returns and drain.repair is Repair.REBOOT:
        return "rebooted, and returned by Slurm itself; the checks are under way"
    return ""


class VerdictWriter:
    """Writes the newest verdict on a thread of its own: a slow disk delays no drain."""

    def __init__(
        self, path: Path, *, on_error: Callable[[OSError], None], on_failure: Callable[[BaseException], object]
    ) -> None:
        """`on_failure` gets a mistake of ours: the next verdict is written all the same."""
        self._path = path
        self._on_error = on_error
        self._on_failure = on_failure
        self._changed = threading.Event()
        self._newest: Verdict | None = None
        threading.Thread(target=self._write_on, name="verdict", daemon=True).start()

    def show(self, verdict: Verdict) -> None:
        """Hand over the newest verdict; returns at once."""
        self._newest = verdict
        self._changed.set()

    def _write_on(self) -> None:
        while True:
            self._changed.wait()
            self._changed.clear()
            try:
                write_atomically(self._path, msgspec.json.encode(self._newest) + b"\n", mode=0o644)
            except OSError as error:
                self._on_error(error)
            except Exception as error:  # noqa: BLE001 - reported
                self._on_failure(error)
