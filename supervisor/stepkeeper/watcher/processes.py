"""Finding and ending what a launch left on a node: by the environment that every rank inherits."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator

from stepkeeper.watcher.assignment import VARIABLE, Assignment, read


def _own_processes() -> Iterator[tuple[int, set[bytes]]]:
    """Yield pid and environment (as it was at exec) of every process of this user."""
    own = os.getuid()
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            if os.stat(f"/proc/{name}").st_uid != own:
                continue
            with open(f"/proc/{name}/environ", "rb") as file:
                yield int(name), set(file.read().split(b"\0"))
        except OSError:
            continue  # ended meanwhile, or not ours to look into


def own_line() -> set[int]:
    """Return this process and those that it descends from, as far as `/proc` shows them: none of them is a rank."""
    line: set[int] = set()
    pid = os.getpid()
    while pid and pid not in line:
        line.add(pid)
        try:
            with open(f"/proc/{pid}/stat", "rb") as file:
                pid = int(file.read().rpartition(b")")[2].split()[1])  # the name before it may hold anything
        except OSError:
            break  # not ours to look into
    return line


def rank_processes(run_id: str, node: str, *, attempt_max: int) -> Iterator[int]:
    """Yield the pids of processes of a run's ranks on a node (wrappers and data loaders included).

    Warm standbys are none while they wait: they hold nothing that the next launch needs, and it may need them.
    Nodes of a test cluster share one process table: the node's name tells their processes apart.
    A process that we descend from is none either, whatever its environment says: to kill it would be to kill ourselves.

    Args:
        run_id: `STEPKEEPER_RUN_ID` of the run.
        node: `SLURMD_NODENAME` of the node.
        attempt_max: no process of a newer attempt: one that was superseded must not end its successor.
    """
    wanted = {f"STEPKEEPER_RUN_ID={run_id}".encode(), f"SLURMD_NODENAME={node}".encode()}
    line = own_line()
    for pid, environment in _own_processes():
        if pid in line or not wanted <= environment or _attempt(environment) > attempt_max:
            continue
        if not _waits(pid, environment):
            yield pid


def _waits(pid: int, environment: set[bytes]) -> bool:
    """Tell whether a process is a warm standby, or its keeper: with a rank's environment, and no rank yet."""
    if not any(entry.startswith(b"STEPKEEPER_STANDBY=") for entry in environment):
        return False
    from stepkeeper import standby  # noqa: PLC0415 - not in watchers of runs that have none

    try:
        with open(f"/proc/{pid}/comm") as file:
            return file.read().strip() == standby.NAME
    except OSError:
        return True  # ended meanwhile


def _attempt(environment: set[bytes]) -> int:
    for entry in environment:
        name, _, value = entry.partition(b"=")
        if name == b"STEPKEEPER_ATTEMPT" and value.isdigit():
            return int(value)
    return 0


def kill_ranks(run_id: str, node: str, *, attempt_max: int) -> int:
    """SIGKILL the processes of a run's ranks on a node; return how many were there."""
    count = 0
    for pid in rank_processes(run_id, node, attempt_max=attempt_max):
        with contextlib.suppress(ProcessLookupError):  # gone is what we wanted
            os.kill(pid, signal.SIGKILL)
            count += 1
    return count


def kill_older_watchers(ours: Assignment, node: str) -> int:
    """SIGKILL this run's watchers of an older bus, attempt or job on the node: srun may have died and left them.

    Without this they would take the supervisor for gone when their lease runs out.
    """
    count = 0
    for pid, environment in _own_processes():
        variables = dict(entry.partition(b"=")[::2] for entry in environment)
        # the srun that starts the watchers has the assignment too, and is no task of a Slurm step
        if variables.get(b"SLURMD_NODENAME") != node.encode() or b"SLURM_STEP_ID" not in variables:
            continue
        if pid == os.getpid() or VARIABLE.encode() not in variables:
            continue
        try:
            theirs = read({VARIABLE: variables[VARIABLE.encode()].decode()})
        except ValueError:
            continue  # of another version: its lease runs out, and it finds us in charge
        if theirs.run_id == ours.run_id and theirs.epoch < ours.epoch:
            with contextlib.suppress(ProcessLookupError):  # gone is what we wanted
                os.kill(pid, signal.SIGKILL)
                count += 1
    return count
