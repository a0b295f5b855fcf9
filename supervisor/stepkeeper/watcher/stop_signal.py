"""Asking ranks without the trainer library to save and end: by the signal that their script handles.

Slurm signals the direct child of a Slurm step.  Where a launcher such as torchrun stands there, it passes some signals
on, swallows others, and kills its workers a while later: so its workers get the signal, and it does not.
"""

from __future__ import annotations

import contextlib
import os
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence

import msgspec

from stepkeeper import wrapper
from stepkeeper.core.policy import STOP_SIGNALS
from stepkeeper.slurm.cmd import is_shell
from stepkeeper.watcher.processes import RankSteps, rank_processes

# What a launcher sets for the ranks that it starts: a process that has more of them than its parent is such a rank.
_OF_RANKS = (b"RANK=", b"TORCHELASTIC_RUN_ID=")
_SRUN = "srun"  # the training step's own: SIGTERM has it kill all ranks


class Process(msgspec.Struct, frozen=True, kw_only=True):
    """One process of a launch, as far as signals are concerned."""

    pid: int
    parent: int
    name: str = ""
    caught: bool = False  # it has a handler for the signal
    ignored: bool = False
    marks: frozenset[bytes] = frozenset()  # of `_OF_RANKS`, those that it has


class _Found(msgspec.Struct):
    catching: list[int] = []
    others: list[int] = []  # that the signal would end


def choose(processes: Mapping[int, Process], with_library: Collection[int]) -> list[int]:
    """Return which processes get the stop signal: of each rank without the trainer library, the first with a handler.

    A shell without a trap is passed over for what it runs.  Where no process of a rank has a handler, none can save:
    the signal ends the rank, and its node is free sooner.

    Args:
        processes: of the launch, by pid.
        with_library: pids of those that have the trainer library: their ranks get a request instead.
    """
    children: dict[int, list[Process]] = defaultdict(list)
    for process in processes.values():
        children[process.parent].append(process)
    chosen: list[int] = []
    for process in processes.values():
        parent = processes.get(process.parent)
        if parent is not None and not process.marks > parent.marks:
            continue  # a part of its parent's rank
        members = list(_members(process, children))
        leads = any(child.marks > member.marks for member in members for child in children[member.pid])
        if not leads and not any(member.pid in with_library for member in members):
            found = _look(process, children)
            chosen += found.catching or found.others
    return sorted(chosen)


def _members(process: Process, children: Mapping[int, Sequence[Process]]) -> Iterator[Process]:
    """Yield a process and all below it that are of the same rank, or of the same launcher."""
    yield process
    for child in children[process.pid]:
        if not child.marks > process.marks:
            yield from _members(child, children)


def _look(process: Process, children: Mapping[int, Sequence[Process]]) -> _Found:
    if process.caught:
        return _Found(catching=[process.pid])
    if not (process.ignored or is_shell(process.name)):
        return _Found(others=[process.pid])  # not what it has forked: a data loader's workers catch SIGTERM
    below = [_look(child, children) for child in children[process.pid]]
    catching = [pid for found in below for pid in found.catching]
    others = [pid for found in below for pid in found.others] if process.ignored else [process.pid]
    return _Found(catching=catching, others=others)


def look(
    run_id: str, node: str, *, attempt_max: int, number: int, steps: RankSteps | None = None
) -> dict[int, Process]:
    """Return the processes of a run's ranks on a node, by pid, and what each does with a signal."""
    found = _scan(run_id, node, attempt_max, number, steps)
    if any(process.name == wrapper.STAND_IN for process in found.values()):
        # the rank for which it stands may have been read before, while it was a standby still
        found |= _scan(run_id, node, attempt_max, number, steps)
    return found


def _scan(run_id: str, node: str, attempt_max: int, number: int, steps: RankSteps | None) -> dict[int, Process]:
    found = {}
    for pid in rank_processes(run_id, node, attempt_max=attempt_max, steps=steps):
        with contextlib.suppress(OSError):  # ended meanwhile
            process = _read(pid, number)
            if process.name != _SRUN:
                found[pid] = process
    return found


def _read(pid: int, number: int) -> Process:
    """Raises OSError."""
    with open(f"/proc/{pid}/status", encoding="utf-8", errors="replace") as file:
        said = dict(line.rstrip("\n").split(":\t", 1) for line in file if ":\t" in line)
    with open(f"/proc/{pid}/environ", "rb") as file:
        variables = file.read().split(b"\0")
    bit = 1 << (number - 1)
    stands_in = said["Name"] == wrapper.STAND_IN  # the rank itself is another process, and gets the signal
    return Process(
        pid=pid,
        parent=int(said["PPid"]),
        name=said["Name"],
        caught=bool(int(said["SigCgt"], 16) & bit) and not stands_in,
        ignored=bool(int(said["SigIgn"], 16) & bit) or stands_in,
        marks=_marks(variables),
    )


def _marks(variables: Sequence[bytes]) -> frozenset[bytes]:
    """Return those of a process; a standby shows the environment of its keeper, and is a rank all the same."""
    names = {each.partition(b"=")[0] for each in variables}
    if b"STEPKEEPER_STANDBY" in names and wrapper.HOOK.encode() not in names:  # with both it is torchrun
        return frozenset(_OF_RANKS)
    return frozenset(mark for mark in _OF_RANKS if mark.removesuffix(b"=") in names)


def send_stop_signal(
    run_id: str,
    node: str,
    name: str,
    *,
    attempt_max: int,
    with_library: Collection[int],
    steps: RankSteps | None = None,
) -> list[Process]:
    """Send the stop signal to the ranks of a node that have no trainer library; return who got it."""
    number = STOP_SIGNALS[name]
    processes = look(run_id, node, attempt_max=attempt_max, number=number, steps=steps)
    sent = []
    for pid in choose(processes, with_library):
        with contextlib.suppress(ProcessLookupError):  # ended meanwhile
            os.kill(pid, number)
            sent.append(processes[pid])
    return sent


def in_words(name: str, sent: Sequence[Process]) -> str:
    """Say who got the signal, and which of them it ends at once."""
    without = [process for process in sent if not process.caught]
    said = f"SIG{name} to {', '.join(f'{process.name} ({process.pid})' for process in sent)}: no trainer library there"
    if without:
        said += f"; without a handler, it ends {'all' if len(without) == len(sent) else len(without)} of them at once"
    return said
