"""Digests of the files of foreign checkpoints, kept since their first verification, outside of the checkpoint.

Their formats have no digest of a whole checkpoint: a file that was rewritten by a save that died in the middle passes
every check of its own.  Compared with the digests of before:

- the same file (inode, size, time of change) with other bytes has rotted on the disk;
- some files written anew and others not is a chimera of two saves;
- all files written anew is another checkpoint of the same name, which is recorded instead.

One small file for each checkpoint below the user's own state directory, mode 0700.  Nothing is written beside the
checkpoint.  Without a home there are no records, and the verdict says so.
"""

from __future__ import annotations

import hashlib
import os
import stat
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from stepkeeper_trainer.formats.durable import write_atomically
from stepkeeper_trainer.formats.plain import DecodeError, decode_format, read_plain

FORMAT = 1
RECORD_BYTES_MAX = 64 * 1024 * 1024
KEPT = 2000
SETTLED_S = 2.0  # a file changed later than this before it was read may change again within one tick of its ctime


class Seen(msgspec.Struct, frozen=True, array_like=True):
    """One file as it was read."""

    inode: int
    bytes: int
    mtime_ns: int
    ctime_ns: int
    xxh3_128: str  # of the file; of a large one `SIZE:` and that of the digests of its pieces of SIZE bytes

    @property
    def is_split(self) -> bool:
        """Whether the digest is that of pieces: only one of the same kind says anything about it."""
        return ":" in self.xxh3_128

    def same_file(self, other: os.stat_result) -> bool:
        """Whether a file was not written to since, as far as its times show."""
        return (self.inode, self.bytes, self.mtime_ns) == (other.st_ino, other.st_size, other.st_mtime_ns)


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """The files of one checkpoint when they were first found right."""

    format: int = FORMAT
    path: str
    first_at: float  # Unix seconds
    read_at: float
    files: dict[str, Seen]


@dataclass(frozen=True, slots=True)
class Compared:
    """What the digests of before show."""

    problems: tuple[str, ...] = ()
    rewritten: bool = False  # as a whole: another checkpoint of the same name


_decoder = msgspec.json.Decoder(Record)


def place(environment: Mapping[str, str]) -> Path | None:
    """Return the directory of the records; None where this user has no home."""
    state, home = environment.get("XDG_STATE_HOME", ""), environment.get("HOME", "")
    if os.path.isabs(state):
        return Path(state, "stepkeeper", "first-sight")
    return Path(home, ".local", "state", "stepkeeper", "first-sight") if os.path.isabs(home) else None


class FirstSight:
    """The records of this user."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        """Read and make nothing yet."""
        self._directory = place(environment)
        self.problem = "" if self._directory is not None else "no home directory: no digests are kept"

    def record(self, checkpoint: Path) -> Record | None:
        """Return what is known of a checkpoint; None where that is nothing, or nothing that can be trusted."""
        if self._directory is None:
            return None
        path = self._directory / self._name(checkpoint)
        try:
            status = os.stat(path, follow_symlinks=False)
            if status.st_uid != os.geteuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                return None
            record = decode_format(_decoder, read_plain(path, RECORD_BYTES_MAX), newest=FORMAT)
        except (OSError, DecodeError):
            return None
        return record if record.path == self._said(checkpoint) else None

    def remember(self, checkpoint: Path, files: Mapping[str, Seen], *, before: Record | None, read_at: float) -> None:
        """Record the files of a checkpoint that was found right as a whole.

        A file that was changed a moment before it was read is left out of what `unchanged` trusts, not of the record.
        """
        if self._directory is None:
            return
        first_at = before.first_at if before is not None else read_at
        record = Record(path=self._said(checkpoint), first_at=first_at, read_at=read_at, files=dict(files))
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.chmod(self._directory, 0o700)
            write_atomically(self._directory / self._name(checkpoint), msgspec.json.encode(record))
            self._forget_oldest()
        except OSError as error:
            self.problem = f"{self._directory}: cannot be written ({error.strerror}): no digests are kept"

    def _forget_oldest(self) -> None:
        assert self._directory is not None
        names = os.listdir(self._directory)
        if len(names) > KEPT:
            paths = sorted((self._directory / name for name in names), key=lambda path: path.stat().st_mtime)
            for path in paths[: len(names) - KEPT]:
                path.unlink(missing_ok=True)

    @staticmethod
    def _said(checkpoint: Path) -> str:
        return os.path.realpath(checkpoint).encode(errors="surrogateescape").decode(errors="backslashreplace")

    @staticmethod
    def _name(checkpoint: Path) -> str:
        return hashlib.sha256(os.fsencode(os.path.realpath(checkpoint))).hexdigest()[:32] + ".json"


def unchanged(record: Record, name: str, status: os.stat_result) -> Seen | None:
    """Return what is known of a file's bytes where it cannot have been written to since they were read."""
    seen = record.files.get(name)
    if seen is None or not seen.same_file(status) or seen.ctime_ns != status.st_ctime_ns:
        return None
    return seen if seen.ctime_ns / 1e9 < record.read_at - SETTLED_S else None


def compare(record: Record, now: Mapping[str, tuple[os.stat_result, str]]) -> Compared:
    """Compare files and their digests with those of before."""
    untouched: list[str] = []
    rotten: list[str] = []
    other = sorted(record.files.keys() - now.keys())
    for name, (status, digest) in now.items():
        before = record.files.get(name)
        if before is None:
            other.append(name)
        elif before.same_file(status):
            (untouched if before.xxh3_128 == digest else rotten).append(name)
        elif before.xxh3_128 != digest:
            other.append(name)
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.first_at))
    problems = [
        f"{name}: its bytes are not those of {when}, and nobody wrote to it since: the storage lost them"
        for name in rotten
    ]
    if other and (untouched or rotten):
        shown = ", ".join(sorted(other)[:3])
        kept = ", ".join(sorted(untouched or rotten)[:3])
        problems.append(
            f"a mixture of two saves: {len(other)} files are not those of {when} ({shown}), and "
            f"{len(untouched) + len(rotten)} still are ({kept})"
        )
    return Compared(tuple(problems), rewritten=bool(other) and not problems)
