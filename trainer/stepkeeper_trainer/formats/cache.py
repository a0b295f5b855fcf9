"""What deep verification has found right, remembered outside of the step directories.

One small file a step below `checkpoints/.verified/`, written by the process that read the bytes.  It remembers single
files: (inode, size, mtime, ctime) and what the manifest says of the bytes.  The kernel sets the ctime and nobody
can set it back, so a file that was written to, replaced or restored is read again; one whose manifest says
something else is too.  Files that were found wrong are remembered likewise, for people who list the steps: they are
read again all the same.  A record never says that a step is verified: names, sizes, manifest and `.metadata` are looked
at each time.  What it cannot see is a disk that forgets bytes by itself; `checkpoints verify` therefore reads
everything, unless asked not to.
"""

from __future__ import annotations

import contextlib
import os
import stat
import time
from typing import TYPE_CHECKING

import msgspec
import xxhash

from stepkeeper_trainer.formats.decoding import DecodeError, decode_format
from stepkeeper_trainer.formats.durable import clear_temporaries, write_atomically
from stepkeeper_trainer.formats.plain import open_plain

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from stepkeeper_trainer.formats.manifest import FileEntry

CACHE_NAME = ".verified"
FORMAT = 1
SETTLED_S = 2.0  # a file changed later than this before it was read may change again within one tick of its ctime
RECORD_BYTES_MAX = 256 * 1024 * 1024
_OTHERS_MAY_WRITE = stat.S_IWGRP | stat.S_IWOTH

Fact = tuple[int, int, int, int, str]  # inode, bytes, mtime in ns, ctime in ns, digest of the manifest's entry


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """What was found right in one step directory."""

    format: int = FORMAT
    at: float  # Unix seconds
    files: dict[str, Fact]
    wrong: dict[str, tuple[str, Fact]] = {}  # what is wrong with a file, and the file that it was then


_decoder = msgspec.json.Decoder(Record)


def fact(status: os.stat_result, entry: FileEntry) -> Fact:
    """Name a file as it is now, together with what its bytes should be."""
    said = xxhash.xxh3_128_hexdigest(msgspec.json.encode(entry))
    return (status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns, said)


class Cache:
    """The records of one `checkpoints/` directory.  A record that is not there or not to be trusted is no record."""

    def __init__(self, checkpoints: Path, *, knows: bool = True) -> None:
        """Nothing is made until something is remembered; `knows` false only remembers."""
        self._directory = checkpoints / CACHE_NAME
        self._knows = knows

    def known(self, manifest_digest: str, wanted: Iterable[Fact], *, own_only: bool = False) -> set[Fact]:
        """Return which of `wanted` were found right once.

        Args:
            manifest_digest: of the step, which names its record.
            wanted: facts of files as they are now.
            own_only: by this step's record; otherwise by any, for steps can share files by links.
        """
        if not self._knows:
            return set()
        own = self._record(f"{manifest_digest}.json")
        missing = set(wanted).difference(fact for _, fact in own.wrong.values())
        found = missing.intersection(own.files.values())
        if found == missing or own_only:
            return found
        for name in self._names():
            found |= missing.intersection(self._record(name).files.values())
        return found

    def known_wrong(self, manifest_digest: str, facts: Mapping[str, Fact]) -> list[str]:
        """Return what was found wrong once in the files of a step that are as they were then."""
        wrong = self._record(f"{manifest_digest}.json").wrong if self._knows else {}
        return [problem for name, (problem, fact) in sorted(wrong.items()) if facts.get(name) == fact]

    def remember(
        self,
        manifest_digest: str,
        facts: Mapping[str, Fact],
        *,
        read_at: float,
        wrong: Mapping[str, tuple[str, Fact]] | None = None,
    ) -> bool:
        """Record files whose every byte was read and right, and those that are wrong; false where that is impossible.

        Args:
            manifest_digest: of the step's manifest.
            facts: by name, taken before the bytes were read and unchanged after.
            read_at: Unix seconds, before the first byte was read.
            wrong: by name, what is wrong with a file, and its fact.
        """
        settled = {name: fact for name, fact in facts.items() if fact[3] / 1e9 < read_at - SETTLED_S}
        if not (settled or wrong) or not self._ours():
            return False
        record = Record(at=time.time(), files=settled, wrong=dict(wrong or {}))
        try:
            os.makedirs(self._directory, mode=0o755, exist_ok=True)
            write_atomically(self._directory / f"{manifest_digest}.json", msgspec.json.encode(record), mode=0o644)
        except OSError:  # somebody else's run, or no space: it is read again next time
            return False
        return True

    def forget_others(self, manifest_digests: Iterable[str]) -> None:
        """Remove the records of steps that are gone."""
        kept = {f"{digest}.json" for digest in manifest_digests}
        for name in self._names():
            if name not in kept:
                with contextlib.suppress(OSError):  # a record too many does no harm
                    os.unlink(self._directory / name)
        clear_temporaries(self._directory)

    def _ours(self) -> bool:
        """Say whether the steps are ours: an admin who looks leaves nothing that their owner could not write to."""
        try:
            return os.stat(self._directory.parent).st_uid == os.geteuid()
        except OSError:
            return False

    def _names(self) -> list[str]:
        try:
            return sorted(name for name in os.listdir(self._directory) if name.endswith(".json"))
        except OSError:  # there is none, or it is not for us
            return []

    def _record(self, name: str) -> Record:
        """Read a record that only its owner may write, who must be the one that may change the steps too."""
        none = Record(at=0.0, files={})
        try:
            with open_plain(self._directory / name, within=self._directory.parent) as file:
                status = os.fstat(file.fileno())
                if status.st_mode & _OTHERS_MAY_WRITE or status.st_size > RECORD_BYTES_MAX:
                    return none
                if status.st_uid not in self._trusted():
                    return none
                return decode_format(_decoder, file.read(status.st_size), newest=FORMAT)
        except (OSError, DecodeError):
            return none

    def _trusted(self) -> set[int]:
        trusted = {os.geteuid(), 0}
        with contextlib.suppress(OSError):  # then our own and root's records count
            trusted.add(os.stat(self._directory.parent).st_uid)
        return trusted
