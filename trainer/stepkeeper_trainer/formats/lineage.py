"""`checkpoints/lineage.jsonl`: which commits lead to the state that training is in now.

Append-only, one JSON object a line, fsynced, each with a digest of itself (older lines have none).  A line that is
torn (a writer died in it) or damaged is skipped: the manifests on disk bridge it.  After a rollback a step number
can exist twice; the lineage tells which one counts, and which data was left out on the way.

An attempt that a newer one has fenced off may be late with a line, since it cannot look and write at once.  So a commit
of a lower attempt than one before it counts only if it goes on from the head: else it is a commit beside the state.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import xxhash

from stepkeeper_trainer.formats.durable import append_line
from stepkeeper_trainer.formats.plain import DecodeError, decode, fresh, open_plain

if TYPE_CHECKING:
    from pathlib import Path

LINEAGE_NAME = "lineage.jsonl"
LINEAGE_BYTES_MAX = 128 * 1024 * 1024  # half a million commits
COMPACTED_EVERY = 1000  # lines
PINNED = "pinned"  # marks: kept whatever the policy says
SUSPECT = "suspect"  # committed within a loss anomaly
EPOCH = "epoch"  # at the end of one
PRUNED = "pruned"  # deleted on purpose, or about to be


class _Record(msgspec.Struct, frozen=True, kw_only=True, tag_field="record"):
    at: float  # Unix seconds
    attempt: int = 0


class Commit(_Record, frozen=True, kw_only=True, tag="commit"):
    """A step directory became complete."""

    step: int
    save_id: str
    parent: str | None
    directory: str


class LeftOut(msgspec.Struct, frozen=True):
    """Data that training does not take: that of `steps` steps from `step` on."""

    step: int
    steps: int


class Rollback(_Record, frozen=True, kw_only=True, tag="rollback"):
    """Training goes on from `save_id` (None: from the very start); later commits no longer count."""

    save_id: str | None
    why: str
    left_out: tuple[LeftOut, ...] | None = None  # all that the run leaves out from now on; None: as before


class Mark(_Record, frozen=True, kw_only=True, tag="mark"):
    """A property of one commit, such as `suspect` or `pinned`; `value` false takes it back."""

    save_id: str
    mark: str
    value: bool = True


_SUM = b',"xxh3":"'  # last in its line
_SUM_BYTES = len(_SUM) + 16 + len(b'"}')

LineageRecord = Commit | Rollback | Mark
_decoder: msgspec.json.Decoder[LineageRecord] = msgspec.json.Decoder(LineageRecord)


@dataclass(frozen=True, slots=True)
class Lineage:
    """The commits that count, oldest first, and the marks they carry."""

    commits: dict[str, Commit]  # every commit ever recorded, by save_id
    head: str | None  # save_id of the newest commit that counts
    marks: dict[str, frozenset[str]]
    has_steps: bool = True  # false: marks only, and nothing of which steps count
    damaged: int = 0  # lines that were there and are not what was written
    rolled_back_at: float | None = None  # Unix seconds, where the newest line of commits is a rollback
    left_out: tuple[LeftOut, ...] = ()  # data that the current state has not seen, or will not see
    attempt: int = 0  # the highest of any commit or rollback

    def chain(self, manifests: Mapping[str, str | None] | None = None) -> list[str]:
        """Return the save_ids that lead to the head, newest first, as far back as anything is known.

        Args:
            manifests: parents by save_id, from the manifests on disk: they bridge a record that was torn or
                never written.
        """
        chain: dict[str, None] = {}  # in order, and no loop of a damaged file is followed twice
        at = self.head
        while at is not None and at not in chain:
            if at not in self.commits and at not in (manifests or {}):
                break
            chain[at] = None
            at = self.parent(at, manifests)
        return list(chain)

    def parent(self, save_id: str, manifests: Mapping[str, str | None] | None = None) -> str | None:
        """Return the parent of a commit; None for the first one, and for one that nobody knows."""
        if save_id in self.commits:
            return self.commits[save_id].parent
        return (manifests or {}).get(save_id)


def read(checkpoints: Path, *, pruned: bool = True) -> Lineage | None:
    """Return the lineage of a `checkpoints/` directory; None where there is no file.

    Args:
        checkpoints: the directory.
        pruned: also commits whose steps were removed on purpose.  Without them memory is bounded by the steps that are
            there, however many saves a run has made; what is known of the others' order stays.

    Raises:
        OSError: the file is there and cannot be read.
    """
    path = checkpoints / LINEAGE_NAME

    def parse() -> Lineage:
        reading = _Reading()
        with open_plain(path, within=checkpoints) as file:
            if os.fstat(file.fileno()).st_size > LINEAGE_BYTES_MAX:
                raise OSError(errno.EFBIG, f"more than {LINEAGE_BYTES_MAX} bytes, which no lineage has", str(path))
            for count, line in enumerate(file, 1):
                reading.take(line.rstrip(b"\r\n"))
                if not pruned and count % COMPACTED_EVERY == 0:
                    reading.forget_pruned()
        if not pruned:
            reading.forget_pruned()
        return reading.lineage()

    try:
        return fresh(parse)
    except FileNotFoundError:
        return None


class _Reading:
    """What the lines of a file tell, so far."""

    def __init__(self) -> None:
        self._commits: dict[str, Commit] = {}
        self._marks: dict[str, frozenset[str]] = {}
        self._head: str | None = None
        self._has_steps, self._damaged, self._attempt = False, 0, 0
        self._rolled_back_at: float | None = None
        self._left_out: tuple[LeftOut, ...] = ()

    def lineage(self) -> Lineage:
        return Lineage(
            self._commits,
            self._head,
            self._marks,
            self._has_steps,
            self._damaged,
            self._rolled_back_at,
            self._left_out,
            self._attempt,
        )

    def take(self, line: bytes) -> None:
        if line[-_SUM_BYTES:].startswith(_SUM) and _summed(line[:-_SUM_BYTES]) != line:
            self._damaged += 1
            return
        try:
            record = decode(_decoder, line)
        except DecodeError:
            return  # torn by a crash, or of a newer version: neither may hide the other lines
        match record:
            case Commit():
                self._commits[record.save_id] = record
                if record.attempt >= self._attempt or (record.parent == self._head and not self._is_late(record)):
                    self._head, self._rolled_back_at = record.save_id, None
            case Rollback():
                self._head, self._rolled_back_at = record.save_id, record.at
                self._left_out = record.left_out if record.left_out is not None else self._left_out
            case Mark():
                before = self._marks.get(record.save_id, frozenset())
                self._marks[record.save_id] = before | {record.mark} if record.value else before - {record.mark}
                return
        self._has_steps, self._attempt = True, max(self._attempt, record.attempt)

    def _is_late(self, commit: Commit) -> bool:
        """Whether an earlier attempt made this commit before the rollback, and its line came after that."""
        return self._rolled_back_at is not None and commit.at < self._rolled_back_at

    def forget_pruned(self) -> None:
        """Leave out what was removed; the steps that came after it follow on those before it."""
        commits = self._commits
        gone = {save_id for save_id, marks in self._marks.items() if PRUNED in marks and save_id != self._head}
        orphans = [commit for save_id, commit in commits.items() if save_id not in gone and commit.parent in gone]
        for commit in orphans:
            parent, passed = commit.parent, {commit.save_id}
            while parent in gone and parent in commits and parent not in passed:
                passed.add(parent)
                parent = commits[parent].parent
            commits[commit.save_id] = msgspec.structs.replace(commit, parent=parent)
        for save_id in gone:
            commits.pop(save_id, None)
            del self._marks[save_id]


def append(checkpoints: Path, record: LineageRecord) -> None:
    """Add one record and make it durable.  Raises OSError."""
    append_line(checkpoints / LINEAGE_NAME, _summed(msgspec.json.encode(record)[:-1]), mode=0o644)


def _summed(fields: bytes) -> bytes:
    """Close an object with the digest of what stands in it."""
    return fields + _SUM + xxhash.xxh3_64_hexdigest(fields).encode() + b'"}'
