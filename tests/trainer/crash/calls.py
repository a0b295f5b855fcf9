"""System calls that change a directory, read off the log of strace."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# What changes files or names, whatever it is called with.
CALLS = (
    "openat,open,creat,openat2,write,writev,pwrite64,pwritev,pwritev2,ftruncate,truncate,fallocate,fsync,fdatasync,"
    "sync_file_range,rename,renameat,renameat2,link,linkat,symlink,symlinkat,unlink,unlinkat,mkdir,mkdirat,rmdir,"
    "mknod,mknodat,chmod,fchmod,fchmodat,chown,fchown,fchownat,utimensat,setxattr,fsetxattr,copy_file_range,"
    "sendfile,splice"
)
_LINE = re.compile(r"^(?:(\d+)\s+)?(?:<\.\.\. )?(\w+)(\(.*| resumed>.*)$")
_OPENED = re.compile(r"<([^<>]+)>")
_NAMED = re.compile(r'"((?:[^"\\]|\\.)*)"')
_BY_DESCRIPTOR = frozenset(
    {"write", "writev", "pwrite64", "pwritev", "pwritev2", "ftruncate", "fallocate", "fsync", "fdatasync"}
    | {"sync_file_range", "fchmod", "fchown", "fsetxattr", "copy_file_range", "sendfile", "splice"}
)
_TARGET = {"copy_file_range": 1, "splice": 1}  # which of its descriptors is written to; of the others the first
_OPENS = frozenset({"openat", "open", "openat2"})
_WRITES_ON_OPEN = ("O_CREAT", "O_TRUNC", "O_TMPFILE")


@dataclass(frozen=True)
class Call:
    """One call, as it was entered."""

    thread: int  # its id; 0 where the log is of one thread
    name: str
    rest: str  # what the log says after the name

    def matches(self) -> list[str]:
        """Return the paths by which `strace -P` finds it: what is relative to a directory, by the directory."""
        if self.name in _BY_DESCRIPTOR:
            return self._changed()
        named = [quoted if quoted.startswith("/") else base for base, quoted in self._named()]
        return list(dict.fromkeys(named))

    def paths(self) -> list[str]:
        """Return the paths that it is about."""
        if self.name in _BY_DESCRIPTOR:
            return self._changed()
        return [quoted if quoted.startswith("/") else f"{base}/{quoted}" for base, quoted in self._named()]

    def _changed(self) -> list[str]:
        at = _TARGET.get(self.name, 0)
        return _OPENED.findall(self.rest)[at : at + 1]

    def _named(self) -> list[tuple[str, str]]:
        base, named = "", []
        for descriptor, quoted in re.findall(r'(?:^\(|, )(?:[\w-]+<([^<>]+)>|"((?:[^"\\]|\\.)*)")', self.rest):
            if descriptor:
                base = descriptor
            else:
                named.append((base, quoted))
        return named

    def changes(self, below: Path) -> bool:
        """Whether it changes a file or a name below a directory, or that directory itself."""
        if self.name in _OPENS and not any(flag in self.rest for flag in _WRITES_ON_OPEN):
            return False
        return any(path == str(below) or path.startswith(f"{below}/") for path in self.paths())

    def about(self, below: Path) -> str:
        """Say what it does, in words that are the same each time the same is done."""
        return f"{self.name} {' '.join(path.removeprefix(f'{below}/') for path in self.paths())}"

    def data(self) -> bytes:
        """Return what a `write` was to write."""
        match = _NAMED.search(self.rest)
        assert match is not None, self.rest
        return bytes(ast.literal_eval(f'b"{match.group(1)}"'))


def read(log: Path) -> list[Call]:
    """Return the calls of a log, in the order in which they were entered."""
    return list(_read(log.read_text(errors="replace").splitlines()))


def _read(lines: list[str]) -> Iterator[Call]:
    for line in lines:
        match = _LINE.match(line)
        if match is not None and not match.group(3).startswith(" resumed>"):
            yield Call(int(match.group(1) or 0), match.group(2), match.group(3))
