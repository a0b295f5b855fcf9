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

CALLS = (
    "write,writev,pwrite64,ftruncate,fsync,fdatasync,rename,renameat,renameat2,openat,link,linkat,mkdir,unlink,"
    "unlinkat,rmdir"
)
_LINE = re.compile(r"^(\d+)\s+(?:<\.\.\. )?(\w+)(.*)$")
_PATH = re.compile(r"<([^<>]+)>")
_NAME = re.compile(r'"([^"]+)"')


@dataclass
class Disk:
    """What is not on disk yet: bytes of files, and names in directories."""

    files: set[str] = field(default_factory=set)
    names: set[str] = field(default_factory=set)
    known: set[str] = field(default_factory=set)  # names that were made before: to open them again makes none

    def lost(self, below: str) -> list[str]:
        """Return what a power cut would take of a directory now."""
        found = [f"bytes of {path}" for path in self.files if path.startswith(f"{below}/")]
        return sorted(found + [f"name {path}" for path in self.names if path.startswith(f"{below}/")])

    def see(self, call: str, rest: str) -> None:
        """Take in one call."""
        names = _NAME.findall(rest)
        if call in ("write", "writev", "pwrite64", "ftruncate"):
            self.files.add(_PATH.findall(rest)[0])
        elif call in ("fsync", "fdatasync"):
            path = _PATH.findall(rest)[0]
            self.files.discard(path)
            self.names = {name for name in self.names if str(Path(name).parent) != path}
        elif call in ("unlink", "unlinkat", "rmdir"):
            path = names[0] if names[0].startswith("/") else f"{_PATH.findall(rest)[0]}/{names[0]}"
            self.names.discard(path)
            self.files.discard(path)
        elif call.startswith("rename"):
            self.files = {_moved(path, names[0], names[-1]) for path in self.files}
            self.names = {_moved(path, names[0], names[-1]) for path in self.names} | {names[-1]}
        elif (call != "openat" or "O_CREAT" in rest) and names[-1] not in self.known:
            self.names.add(names[-1])
            self.known.add(names[-1])


def _moved(path: str, source: str, target: str) -> str:
    return target + path.removeprefix(source) if path == source or path.startswith(f"{source}/") else path


def trace(script: str, *arguments: str, log: Path) -> list[tuple[str, str]]:
    """Run Python under strace and return its calls, fsyncs when they are done, all others when they begin."""
    command = ["strace", "-f", "-y", "-s", "300", "-e", f"trace={CALLS}", "-o", str(log)]
    done = subprocess.run(
        [*command, sys.executable, "-c", script, *arguments], timeout=120, check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return list(_calls(log.read_text(errors="replace").splitlines()))


def _calls(lines: list[str]) -> Iterator[tuple[str, str]]:
    begun: dict[str, str] = {}
    for line in lines:
        match = _LINE.match(line)
        if match is None:
            continue
        thread, call, rest = match.groups()
        if " resumed>" in rest:
            if call in ("fsync", "fdatasync"):
                yield call, begun[thread]
            continue
        if "<unfinished" in rest and call in ("fsync", "fdatasync"):
            begun[thread] = rest
            continue
        yield call, rest


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
