"""Reads a log of system calls: what would a power cut at the moment of a commit have lost?

Kills cannot see a missing fsync; the order of calls can.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.trainer.crash.calls import Call

CALLS = (
    "write,writev,pwrite64,pwritev,pwritev2,ftruncate,truncate,fallocate,copy_file_range,sendfile,fsync,fdatasync,"
    "rename,renameat,renameat2,open,openat,link,linkat,symlink,symlinkat,mkdir,mkdirat,unlink,unlinkat,rmdir"
)
FORKS = ("clone", "clone3", "fork", "vfork")
BYTES = frozenset(CALLS.partition(",fsync")[0].split(","))  # what changes those of a file: a cut does too
SYNCS = ("fsync", "fdatasync")
BEGINS = " begins"  # said of a sync, which covers nothing that comes after that
_LINE = re.compile(r"^(\d+)\s+(?:<\.\.\. )?(\w+)(.*)$")


@dataclass
class Disk:
    """What is not on disk yet: bytes of files, and names in directories; each with the number of the call."""

    files: dict[str, int] = field(default_factory=dict)
    names: dict[str, int] = field(default_factory=dict)
    known: set[str] = field(default_factory=set)  # names that were made before: to open them again makes none
    _number: int = 0
    _syncing: dict[str, int] = field(default_factory=dict)  # by path: when it began

    def lost(self, below: str) -> list[str]:
        """Return what a power cut would take of a directory now."""
        found = [f"bytes of {path}" for path in self.files if path.startswith(f"{below}/")]
        return sorted(found + [f"name {path}" for path in self.names if path.startswith(f"{below}/")])

    def see(self, call: str, rest: str) -> None:
        """Take in one call."""
        self._number += 1
        name, begins, _ = call.partition(BEGINS)
        paths = Call(0, name, rest).paths()
        if name in BYTES:
            self.files[paths[0]] = self._number
        elif begins:
            self._syncing[paths[0]] = self._number
        elif name in SYNCS:
            self._synced(paths[0], self._syncing.pop(paths[0], self._number))
        elif name in ("unlink", "unlinkat", "rmdir"):
            for found in (self.names, self.files):
                found.pop(paths[0], None)
            self.known.discard(paths[0])
        elif name.startswith("rename"):
            self._rename(*paths)
        elif not name.startswith("open") or "O_CREAT" in rest or "O_TRUNC" in rest:
            self._make(paths[-1], cut="O_TRUNC" in rest)

    def hear(self, call: str, rest: str) -> None:
        """Take in what another machine did: it renames and removes names, and syncs none of this one's."""
        paths = Call(0, call, rest).paths()
        if call.startswith("rename"):
            self._move(*paths)
        elif call in ("unlink", "unlinkat", "rmdir"):
            self.names.pop(paths[0], None)
            self.files.pop(paths[0], None)

    def _synced(self, path: str, began: int) -> None:
        if self.files.get(path, began) <= began:
            self.files.pop(path, None)
        self.names = {
            name: number for name, number in self.names.items() if str(Path(name).parent) != path or number > began
        }

    def _rename(self, source: str, target: str) -> None:
        self._move(source, target)
        self.known |= {target}
        self.names[target] = self._number

    def _move(self, source: str, target: str) -> None:
        self.files = {_moved(path, source, target): number for path, number in self.files.items()}
        self.names = {_moved(path, source, target): number for path, number in self.names.items()}
        self.known = {_moved(path, source, target) for path in self.known}

    def _make(self, path: str, *, cut: bool) -> None:
        if path not in self.known:
            self.names[path] = self._number
            self.known.add(path)
        elif cut:
            self.files[path] = self._number


def _moved(path: str, source: str, target: str) -> str:
    return target + path.removeprefix(source) if path == source or path.startswith(f"{source}/") else path


def trace(script: str, *arguments: str, log: Path) -> list[tuple[str, str]]:
    """Run Python under strace and return its calls as they begin, and syncs once more when they are done."""
    return [call for _, call in trace_all(script, *arguments, log=log)]


def trace_all(script: str, *arguments: str, log: Path) -> list[tuple[int, tuple[str, str]]]:
    """Do as `trace`, for a script that forks, and return with each call which process made it."""
    command = ["strace", "-f", "-y", "-s", "300", "-e", f"trace={CALLS},{','.join(FORKS)}", "-o", str(log)]
    done = subprocess.run(
        [*command, sys.executable, "-c", script, *arguments], timeout=400, check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return list(_calls(log.read_text(errors="replace").splitlines()))


def _calls(lines: list[str]) -> Iterator[tuple[int, tuple[str, str]]]:
    """Yield each call with the id of its process."""
    begun: dict[str, str] = {}
    processes = _processes(lines)
    for line in lines:
        match = _LINE.match(line)
        if match is None:
            continue
        thread, call, rest = match.groups()
        own = processes.get(thread, int(thread))
        if call in FORKS:
            continue
        if " resumed>" in rest:
            if call in SYNCS:
                yield own, (call, f"{begun[thread]} {rest}")
            continue
        if "<unfinished" in rest and call in SYNCS:
            begun[thread] = rest
            yield own, (f"{call}{BEGINS}", rest)
            continue
        yield own, (call, rest)


def _processes(lines: list[str]) -> dict[str, int]:
    """Return the process of each thread that was made."""
    begun: dict[str, str] = {}
    found: dict[str, int] = {}
    for line in lines:
        match = _LINE.match(line)
        if match is None or match.group(2) not in FORKS:
            continue
        thread, _, rest = match.groups()
        if "<unfinished" in rest:
            begun[thread] = rest
            continue
        whole = begun.pop(thread, "") + rest
        made = whole.rpartition("= ")[2].split()
        if made and made[0].isdigit() and "CLONE_THREAD" in whole:
            found[made[0]] = int(thread)
    return {thread: _first(by, found) for thread, by in found.items()}


def _first(thread: int, made_by: dict[str, int]) -> int:
    """Return the thread that a process began with: others may be made by others."""
    while (by := made_by.get(str(thread))) is not None:
        thread = by
    return thread


def replay_apart(calls: list[tuple[int, tuple[str, str]]], commit: re.Pattern[str]) -> list[list[str]]:
    """Do as `replay` for processes on machines of their own: what one syncs makes nothing of another's durable."""
    disks = {process: Disk() for process, _ in calls}
    found: list[list[str]] = []
    for process, (call, rest) in calls:
        if "= -1 " in rest:
            continue
        match = commit.search(rest) if call.startswith("rename") else None
        if match is not None:
            found.append(sorted(lost for disk in disks.values() for lost in disk.lost(match.group(1))))
        for each, disk in disks.items():
            disk.see(call, rest) if each == process else disk.hear(call, rest)
    return found


def replay(
    calls: list[tuple[str, str]], commit: re.Pattern[str], by: str = "rename", *, there: Iterable[str] = ()
) -> tuple[list[list[str]], Disk]:
    """Return what each commit would lose in a power cut, and what is open at the end.

    A commit is a call whose name begins with `by` and whose text matches; the first group is what must not be lost.
    `there` are names that were there before.
    """
    disk = Disk(known=set(there))
    found: list[list[str]] = []
    for call, rest in calls:
        if "= -1 " in rest:
            continue
        match = commit.search(rest) if call.startswith(by) else None
        if match is not None:
            found.append(disk.lost(match.group(1)))
        disk.see(call, rest)
    return found, disk
