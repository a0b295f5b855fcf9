"""`checkpoints/lineage.jsonl`: which commits lead to the state that training is in now.

Append-only, one JSON object a line, fsynced, each with a digest of itself (older lines have none).  A line that is
torn (a writer died in it) or damaged is skipped: the manifests on disk bridge it.  After a rollback a step number
can exist twice; the lineage tells which one counts, and which data was left out on the way.

An attempt that a newer one has fenced off may be late with a line, since it cannot look and write at once.  So a commit
of a lower attempt than one before it counts only if it goes on from the head: else it is a commit beside the state.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import xxhash

from stepkeeper_trainer.formats.decoding import DecodeError, decode
from stepkeeper_trainer.formats.durable import append_line
from stepkeeper_trainer.formats.plain import read_plain

if TYPE_CHECKING:
    from pathlib import Path

LINEAGE_NAME = "lineage.jsonl"
LINEAGE_BYTES_MAX = 128 * 1024 * 1024  # half a million commits
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
    tells_steps: bool = True  # false: marks only, and nothing of which steps count
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


def read(checkpoints: Path) -> Lineage | None:
    """Return the lineage of a `checkpoints/` directory; None where there is no file.

    Raises:
        OSError: the file is there and cannot be read.
    """
    try:
        data = read_plain(checkpoints / LINEAGE_NAME, LINEAGE_BYTES_MAX, within=checkpoints)
    except FileNotFoundError:
        return None
    commits: dict[str, Commit] = {}
    marks: dict[str, frozenset[str]] = {}
    head: str | None = None
    tells_steps, damaged = False, 0
    rolled_back_at: float | None = None
    left_out: tuple[LeftOut, ...] = ()
    attempt = 0
    for line in data.splitlines():
        if line[-_SUM_BYTES:].startswith(_SUM) and _summed(line[:-_SUM_BYTES]) != line:
            damaged += 1
            continue
        try:
            record = decode(_decoder, line)
        except DecodeError:
            continue  # torn by a crash, or of a newer version: neither may hide the other lines
        match record:
            case Commit():
                commits[record.save_id] = record
                if record.attempt >= attempt or record.parent == head:
                    head, rolled_back_at = record.save_id, None
                tells_steps, attempt = True, max(attempt, record.attempt)
            case Rollback():
                attempt = max(attempt, record.attempt)
                head, tells_steps, rolled_back_at = record.save_id, True, record.at
                left_out = record.left_out if record.left_out is not None else left_out
            case Mark():
                before = marks.get(record.save_id, frozenset())
                marks[record.save_id] = before | {record.mark} if record.value else before - {record.mark}
    return Lineage(commits, head, marks, tells_steps, damaged, rolled_back_at, left_out, attempt)


def append(checkpoints: Path, record: LineageRecord) -> None:
    """Add one record and make it durable.  Raises OSError."""
    append_line(checkpoints / LINEAGE_NAME, _summed(msgspec.json.encode(record)[:-1]), mode=0o644)


def _summed(fields: bytes) -> bytes:
    """Close an object with the digest of what stands in it."""
    return fields + _SUM + xxhash.xxh3_64_hexdigest(fields).encode() + b'"}'
