"""Find and end the processes of a lab, always by process id, never by name.

Three independent ways lead to a process: ancestry below the guardian, the cgroups of the lab's nodes, and the
environment that the daemons were started with.  An orphan that escapes one is found by another.
"""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path

LAB_VARIABLE = "STEPKEEPER_LAB"
"""In the environment of every daemon: the lab's directory; slurmstepd inherits it."""
NODE_VARIABLE = "STEPKEEPER_LAB_NODE"


def stat(pid: int) -> tuple[str, str, int, int] | None:
    """Return (name, state, parent, start time in ticks) of a process, None where it is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    head, _, rest = text.rpartition(")")
    fields = rest.split()
    return head.partition("(")[2], fields[0], int(fields[1]), int(fields[19])


def alive(pid: int, started: int | None = None) -> bool:
    """Tell whether a process runs; with its start time, a later process of the same id does not count."""
    found = stat(pid)
    return found is not None and found[1] not in "ZX" and (started is None or found[3] == started)


def name(pid: int) -> str:
    """Return the name of a process as the kernel has it; empty where it is gone."""
    found = stat(pid)
    return found[0] if found else ""


def parent(pid: int) -> int:
    """Return the parent's id, 0 where the process is gone."""
    found = stat(pid)
    return found[2] if found else 0


def title(pid: int) -> str:
    """Return the command line, which slurmstepd replaces by `slurmstepd: [JOB.STEP]`."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


def every_pid() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def descendants(root: int) -> set[int]:
    """Return all processes below one, not itself, zombies left out."""
    return descendants_of_all([root])


def descendants_of_all(roots: Iterable[int]) -> set[int]:
    """Return all processes below some, by one look at the process table."""
    below: dict[int, list[int]] = {}
    dead = set()
    for pid in every_pid():
        if found := stat(pid):
            below.setdefault(found[2], []).append(pid)
            if found[1] in "ZX":
                dead.add(pid)
    result: set[int] = set()
    todo = list(roots)
    while todo:
        new = [pid for pid in below.get(todo.pop(), []) if pid not in result]
        result.update(new)
        todo += new
    return result - dead


def children_first(pids: set[int]) -> list[int]:
    """Order processes so that each comes before its parent."""

    def depth(pid: int) -> int:
        above = 0
        while (pid := parent(pid)) in pids:
            above += 1
        return above

    return sorted(pids, key=depth, reverse=True)


def environment(pid: int) -> dict[str, str]:
    """Return the environment that a process was started with; empty where it is gone."""
    try:
        raw = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return {}
    pairs = (item.partition("=") for item in raw.decode(errors="replace").split("\0") if "=" in item)
    return {key: value for key, _, value in pairs}


def by_environment(variable: str, value: str) -> set[int]:
    """Return every process whose environment says so."""
    return {pid for pid in every_pid() if environment(pid).get(variable) == value}


def cgroup_mountpoint() -> Path | None:
    """Return the directory below which cgroup v1 controllers are mounted, if the freezer is one of them."""
    for line in Path("/proc/mounts").read_text().splitlines():
        _, where, kind, options, *_ = line.split()
        if kind == "cgroup" and "freezer" in options.split(",") and where.endswith("/freezer"):
            return Path(where).parent
    return None


def cgroups_of(mountpoint: Path | None, node: str) -> list[Path]:
    """Return the cgroup directories that Slurm made for one node, in every controller."""
    return sorted(mountpoint.glob(f"*/slurm_{node}")) if mountpoint else []


def pids_in(cgroups: Iterable[Path]) -> set[int]:
    """Return all processes in some cgroups and below them."""
    result: set[int] = set()
    for top in cgroups:
        for directory, _, _ in os.walk(top):
            with contextlib.suppress(OSError):  # the cgroup has gone meanwhile
                result.update(int(line) for line in (Path(directory) / "cgroup.procs").read_text().split())
    return result


def remove_cgroups(cgroups: Iterable[Path]) -> None:
    """Remove empty cgroups, leaves first: the directories alone, as their files cannot be removed."""
    for top in cgroups:
        for directory, _, _ in os.walk(top, topdown=False):
            with contextlib.suppress(OSError):  # still busy: the caller checks what is left
                os.rmdir(directory)


def send(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):  # already gone
            os.kill(pid, number)


def kill_all(find: Callable[[], set[int]], timeout_s: float = 40.0) -> set[int]:
    """Send SIGKILL to what `find` returns until it returns nothing; return what is left after the limit."""
    until = time.monotonic() + timeout_s
    while left := {pid for pid in find() if pid != os.getpid() and alive(pid)}:
        if time.monotonic() > until:
            return left
        send(left, signal.SIGKILL)
        time.sleep(0.01)
    return set()
