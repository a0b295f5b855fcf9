"""Finding and ending what a launch left on a node: by the environment that every rank inherits, and by its Slurm step.

A program may overwrite the memory of its environment, as `setproctitle` does.  Such a process is found by the Slurm
step that other processes of the launch were in: by the cgroup of that step, or by the session of its slurmstepd.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
from collections.abc import Iterator

from stepkeeper.watcher.messages import VARIABLE, Assignment, read

_CGROUP = re.compile(rb"^[^:\n]*:[^:\n]*:(\S*/job_\d+/step_\d+)(?=[/\s]|$)", re.MULTILINE)  # version 1 and 2
_STEPD, _SRUN = b"slurmstepd", b"srun"
_NO_TASKS = re.compile(rb"\.(batch|extern|interactive)\]")  # in the title of a slurmstepd: its step has no ranks
_STATE, _PARENT, _SESSION = 0, 1, 3  # in /proc/PID/stat, counted behind the name


def _own_processes() -> Iterator[tuple[int, set[bytes]]]:
    """Yield pid and environment (as it was at exec) of every process of this user; empty where that is hidden."""
    own = os.getuid()
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            if os.stat(f"/proc/{name}").st_uid != own:
                continue
            with open(f"/proc/{name}/environ", "rb") as file:
                yield int(name), set(file.read().split(b"\0"))
        except PermissionError:
            yield int(name), set()
        except OSError:
            continue  # ended meanwhile


def _stat(pid: int) -> tuple[bytes, list[bytes]]:
    """Return name and further fields of a process.  Raises OSError."""
    with open(f"/proc/{pid}/stat", "rb") as file:
        before, _, after = file.read().rpartition(b")")
    return before.partition(b"(")[2], after.split()


def _ancestors(pid: int) -> Iterator[int]:
    """Yield the pids above a process, as far as they are known."""
    with contextlib.suppress(OSError):  # ended meanwhile
        while (pid := int(_stat(pid)[1][_PARENT])) > 1:
            yield pid


class RankSteps:
    """The Slurm steps that ranks on this node were seen in."""

    def __init__(self) -> None:
        """Know none."""
        self._cgroups: set[bytes] = set()
        self._sessions: set[int] = set()

    def __bool__(self) -> bool:
        """Whether one is known."""
        return bool(self._cgroups or self._sessions)

    def learn(self, pid: int) -> None:
        """Remember the Slurm step of a rank; nothing where it is not below a slurmstepd, or is our own.

        The srun of a launch has the environment of its ranks, and is in the batch step, beside the supervisor.
        """
        with contextlib.suppress(OSError):  # ended meanwhile
            if _stat(pid)[0] == _SRUN:
                return
            self._cgroups |= _cgroups(pid) - _cgroups(os.getpid())
            session = _session_of_stepd(pid)
            if session is not None and session != _session_of_stepd(os.getpid()):
                self._sessions.add(session)

    def forget(self) -> None:
        """Their launch is over, and nothing of it is left: the numbers may be used again."""
        self._cgroups, self._sessions = set(), set()

    def has(self, pid: int) -> bool:
        """Tell whether a process is in one of them: no zombie, nor slurmstepd itself."""
        try:
            name, fields = _stat(pid)
            if fields[_STATE] in {b"Z", b"X"} or name == _STEPD:
                return False
            if int(fields[_SESSION]) in self._sessions or _cgroups(pid) & self._cgroups:
                return True
            return bool(self._sessions) and _session_of_stepd(pid) in self._sessions
        except OSError:
            return False  # ended meanwhile


def _cgroups(pid: int) -> set[bytes]:
    """Return the cgroups of the Slurm step that a process is in.  Raises OSError."""
    with open(f"/proc/{pid}/cgroup", "rb") as file:
        return set(_CGROUP.findall(file.read()))


def _session_of_stepd(pid: int) -> int | None:
    """Return the session of the slurmstepd above a process: its tasks are in it, but for those that left it."""
    with contextlib.suppress(OSError):  # ended meanwhile
        for above in _ancestors(pid):
            name, fields = _stat(above)
            if name == _STEPD:
                with open(f"/proc/{above}/cmdline", "rb") as file:
                    return None if _NO_TASKS.search(file.read()) else int(fields[_SESSION])
    return None


def rank_processes(run_id: str, node: str, *, attempt_max: int, steps: RankSteps | None = None) -> Iterator[int]:
    """Yield the pids of processes of a run's ranks on a node (wrappers and data loaders included).

    Warm standbys are none while they wait: they hold nothing that the next launch needs, and it may need them.
    Nodes of a test cluster share one process table: the node's name distinguishes their processes.

    Args:
        run_id: `STEPKEEPER_RUN_ID` of the run.
        node: `SLURMD_NODENAME` of the node.
        attempt_max: no process of a newer attempt: one that was superseded must not end its successor.
        steps: those whose environment does not say are found by them.
    """
    wanted = {f"STEPKEEPER_RUN_ID={run_id}".encode(), f"SLURMD_NODENAME={node}".encode()}
    never = {os.getpid(), *_ancestors(os.getpid())}
    for pid, environment in _own_processes():
        if pid in never:
            continue
        if wanted <= environment:
            if _attempt(environment) <= attempt_max and not _waits(pid, environment):
                yield pid
        elif steps and not _tells(environment) and steps.has(pid):
            yield pid


def _tells(environment: set[bytes]) -> bool:
    """Tell whether an environment says whose process it is: it was neither overwritten nor emptied."""
    names = {entry.partition(b"=")[0] for entry in environment}
    return {b"STEPKEEPER_RUN_ID", b"SLURMD_NODENAME"} <= names


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


def kill_ranks(run_id: str, node: str, *, attempt_max: int, steps: RankSteps | None = None) -> int:
    """SIGKILL the processes of a run's ranks on a node; return how many were there."""
    count = 0
    for pid in rank_processes(run_id, node, attempt_max=attempt_max, steps=steps):
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
