"""Who reads which shard of a step directory.  Pure: instants are arguments, readers are names of nodes.

Readers come and go while it goes on; each takes the next shard when it has done one, so a slow one reads less.
Where nothing is left to begin, an idle reader also reads what another has stalled on, is slow with, or was lost
with: the first answer counts.  What one reader finds wrong is read by another one too, for it may be the reader
that cannot read: a shard is damaged when two say so, or when there is nobody else.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection, Mapping

import msgspec

from stepkeeper_trainer.formats.verify import ShardVerdict

STALLED_S = 10.0  # without a byte: somebody else may try
PATIENCE_MIN_S = 5.0  # a shard is not slow before this
SLOW = 2.0  # times as long as the median of the shards that are done
AT_MOST = 2  # readers of one shard


class _Reading(msgspec.Struct, kw_only=True):
    """What a reader does now."""

    index: int
    since: float
    bytes: int = 0
    moved_at: float  # when it last read something


class Shards:
    """The shards of one step directory."""

    def __init__(self, of: int, *, avoid: Mapping[int, Collection[str]] | None = None) -> None:
        """Nobody reads yet.

        Args:
            of: how many shards there are.
            avoid: readers that should not read a shard while there is another one: they wrote it.
        """
        self.of = of
        self.found: dict[int, ShardVerdict] = {}
        self.readers: set[str] = set()  # that are here
        self.took_part: set[str] = set()
        self.mistaken: set[str] = set()  # readers who found wrong what another one found right
        self._avoid = avoid or {}
        self._waiting = list(range(of))
        self._busy: dict[str, _Reading] = {}
        self._took_s: list[float] = []
        self._doubted: dict[int, tuple[str, ShardVerdict]] = {}  # found wrong by one reader so far

    @property
    def over(self) -> bool:
        """Whether all is read, or something is wrong, which is enough."""
        return len(self.found) == self.of or self.damaged

    @property
    def damaged(self) -> bool:
        """Whether a shard has a problem."""
        return any(found.problems for found in self.found.values())

    def here(self, readers: Collection[str]) -> None:
        """Take note of who can read now; what a lost reader had begun waits for another one."""
        for lost in self.readers - set(readers):
            self._drop(lost)
        self.readers = set(readers)

    def _drop(self, reader: str) -> None:
        reading = self._busy.pop(reader, None)
        if reading is not None and reading.index not in self.found and not self._others(reading.index, reader):
            self._waiting.insert(0, reading.index)

    def _others(self, index: int, reader: str) -> list[str]:
        return [other for other, reading in self._busy.items() if other != reader and reading.index == index]

    def next_for(self, reader: str, now: float) -> int | None:
        """Return the shard that an idle reader should begin, and note that it does."""
        if self.over or reader in self._busy or reader not in self.readers:
            return None
        index = next((index for index in self._waiting if self._may(reader, index)), None)
        if index is not None:
            self._waiting.remove(index)
        else:
            index = self._late(reader, now)
        if index is not None:
            self._busy[reader] = _Reading(index=index, since=now, moved_at=now)
        return index

    def _may(self, reader: str, index: int) -> bool:
        avoid = set(self._avoid.get(index, ()))
        if index in self._doubted:
            avoid = {self._doubted[index][0]}
        return reader not in avoid or self.readers <= avoid

    def _late(self, reader: str, now: float) -> int | None:
        """Return a shard that another reader has trouble with."""
        patience_s = max(PATIENCE_MIN_S, SLOW * statistics.median(self._took_s)) if self._took_s else None
        candidates = sorted(self._busy.values(), key=lambda reading: reading.since)
        for reading in candidates:
            stalled = now - reading.moved_at >= STALLED_S
            slow = patience_s is not None and now - reading.since >= patience_s
            readers = [one for one in self._busy.values() if one.index == reading.index]
            free = reading.index not in self.found and len(readers) < AT_MOST
            if free and (stalled or (slow and self._may(reader, reading.index))):
                return reading.index
        return None

    def receive(self, reader: str, index: int, count: int, now: float) -> None:
        """Note how many bytes of its shard a reader has read."""
        reading = self._busy.get(reader)
        if reading is not None and reading.index == index and count > reading.bytes:
            reading.bytes, reading.moved_at = count, now

    def done(self, reader: str, found: ShardVerdict, now: float) -> None:
        """Take an answer, the first for each shard; a reader that is lost meanwhile has read it all the same."""
        reading = self._busy.get(reader)
        if reading is not None and reading.index == found.index:
            del self._busy[reader]
            self._took_s.append(now - reading.since)
            self.took_part.add(reader)
        if found.of != self.of or not 0 <= found.index < self.of or found.index in self.found:
            return
        if found.problems and found.index not in self._doubted:
            self._doubted[found.index] = (reader, found)
            if not self._others(found.index, reader) and found.index not in self._waiting:
                self._waiting.insert(0, found.index)
            return
        self.found[found.index] = found
        if found.index in self._waiting:
            self._waiting.remove(found.index)
        if found.index in self._doubted and not found.problems:
            self.mistaken.add(self._doubted[found.index][0])

    def failed(self, reader: str) -> None:
        """Take back what a reader could not read."""
        self._drop(reader)
