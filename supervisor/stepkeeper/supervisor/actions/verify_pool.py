"""The readers of a large step directory: this process, and the watchers of the other nodes over the bus.

One verification is under way at a time; a newer one ends it.  This process reads like any other reader, so the first
look at the start of an attempt need not wait for watchers: they join it as they come.
"""

from __future__ import annotations

import dataclasses
import queue
import threading
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

import msgspec

from stepkeeper.supervisor.actions.shards import Shards
from stepkeeper.supervisor.sources.bus import Bus
from stepkeeper.watcher import messages as lines
from stepkeeper_trainer.formats.reading import Reading
from stepkeeper_trainer.formats.verify import Cache, ShardVerdict, Verdict, join_shards, verify_shard

MIB = 2**20
READERS_MAX = 32  # more do not make shared storage faster
ALONE_S = 4.0  # that long one node may read alone
SHARES_PER_READER = 4  # the last one to end keeps the others waiting for a quarter of its work
LOOK_EVERY_S = 0.25
OWN_END_WITHIN_S = 5.0


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """How step directories are read."""

    mib_per_s: float = 0.0
    """By each node, at most; 0: no limit."""

    shared_mib_min: float = 1024.0
    """A smaller step directory is read by the supervisor alone: one node reads a GiB within seconds.

    Where `mib_per_s` makes reading slower, it is what one node reads in `ALONE_S`, if that is less.
    """

    @property
    def bytes_per_s(self) -> float | None:
        """The limit of each reader, as `Reading` wants it."""
        return self.mib_per_s * MIB or None

    @property
    def shared_min(self) -> float:
        """The size in bytes from which on nodes read a step directory together."""
        mib = min(self.shared_mib_min, self.mib_per_s * ALONE_S) if self.mib_per_s else self.shared_mib_min
        return mib * MIB

    def count_shards(self, size: int, readers: int) -> int:
        """Return in how many shards so many bytes are read; 1: by the supervisor alone."""
        if size < self.shared_min:
            return 1
        share_min = max(1, int(self.shared_min / SHARES_PER_READER))
        return max(1, min(SHARES_PER_READER * min(readers, READERS_MAX), size // share_min))


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """One step directory to be read in shards."""

    directory: Path
    of: int
    from_disk: bool = False
    avoid: Mapping[int, Collection[str]] = {}  # by shard: nodes that wrote what is in it


class Read(msgspec.Struct, frozen=True, kw_only=True):
    """What came of it."""

    verdict: Verdict
    readers: tuple[str, ...]  # nodes that took part


class _Word(msgspec.Struct, frozen=True, kw_only=True):
    """What a reader says of a shard."""

    reader: str
    number: int
    index: int
    bytes_read: int = 0
    error: str = ""
    found: ShardVerdict | None = None


class VerifyPool:
    """Who can read, now."""

    def __init__(self, own_node: str, size: int, limits: Limits, note: Callable[[str, str], None]) -> None:
        """Nobody but this process, so far.

        Args:
            own_node: where this process runs.
            size: nodes of the allocation.
            limits: how to read.
            note: called with a node and something for the log, on any thread.
        """
        self.own_node = own_node
        self.size = size
        self.limits = limits
        self.note = note
        self.bus: Bus | None = None
        self._number = 0  # of the newest verification
        self._reads = 0  # step directories read in shards: each has a number of its own on the bus
        self._words: queue.SimpleQueue[_Word] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._one_at_a_time = threading.Lock()

    def use(self, bus: Bus) -> None:
        """Speak to the watchers of a new bus from now on."""
        self.bus = bus

    def receive(self, message: lines.ShardRead) -> None:
        """Take the message of a watcher."""
        found = None
        if message.done and not message.error:
            more = f" (and {message.problems - 1} more)" if message.problems > 1 else ""
            found = ShardVerdict(
                index=message.index,
                of=message.of,
                problems=(f"{message.problem}{more}",) if message.problem else (),
                bytes_read=message.bytes_read,
                manifest=message.manifest,
                seen=message.seen,
                began_at=message.began_at,
            )
        self._words.put(
            _Word(
                reader=message.node,
                number=message.number,
                index=message.index,
                bytes_read=message.bytes_read,
                error=message.error,
                found=found,
            )
        )

    def begin(self) -> int:
        """Return the number of a new verification; those before it end soon."""
        with self._lock:
            self._number += 1
            return self._number

    def is_old(self, number: int) -> bool:
        """Tell whether a newer verification has begun."""
        return number < self._number

    def read(self, wanted: Wanted, number: int, cache: Cache | None) -> Read | None:
        """Have every byte read and compared; None when a newer verification has begun."""
        with self._one_at_a_time:  # the one before ends within a piece or two
            if self.is_old(number):
                return None
            self._reads += 1
            shared = _Shared(self, wanted, self._reads, lambda: self.is_old(number))
            try:
                shared.run()
            finally:
                self._say(lines.ReadNoMore(number=self._reads))
        shards = shared.shards
        for node in sorted(shards.mistaken):
            text = f"could not read a shard of {wanted.directory.name} that another node found right"
            self.note(node, text)
        if not shards.over:
            return None
        found = [shards.found[index] for index in sorted(shards.found)]
        if shards.damaged:
            problems = tuple(problem for shard in found for problem in shard.problems)
            verdict = Verdict(wanted.directory, problems, sum(shard.bytes_read for shard in found))
        else:
            verdict = join_shards(wanted.directory, found, cache=cache)
        return Read(verdict=verdict, readers=tuple(sorted(shards.took_part)))

    # --- for a verification under way -------------------------------------------------------------

    def readers(self) -> set[str]:
        """Return who can read now; this process stands for the watcher beside it."""
        bus = self.bus
        others = sorted(bus.readers() - {self.own_node}) if bus is not None else []
        return {self.own_node, *others[: READERS_MAX - 1]}

    def word(self, within_s: float) -> _Word | None:
        """Return the next message of a reader."""
        try:
            return self._words.get(timeout=within_s)
        except queue.Empty:
            return None

    def put(self, word: _Word) -> None:
        """Take this process's own word."""
        self._words.put(word)

    def ask(self, node: str, wanted: Wanted, number: int, index: int) -> None:
        """Have a watcher read a shard."""
        self._say(
            lines.Read(
                node=node,
                number=number,
                directory=wanted.directory.name,
                index=index,
                of=wanted.of,
                mib_per_s=self.limits.mib_per_s,
                from_disk=wanted.from_disk,
            )
        )

    def _say(self, message: lines.ToWatcher) -> None:
        bus = self.bus
        if bus is not None:
            bus.say(message)


class _Shared:
    """One verification under way: gives out shards until all of them are found."""

    def __init__(self, pool: VerifyPool, wanted: Wanted, number: int, is_old: Callable[[], bool]) -> None:
        self._pool = pool
        self._wanted = wanted
        self._number = number
        self._is_old = is_old
        self._over = False
        self._asked_at: dict[int, float] = {}  # shard -> Unix seconds, when it was given out first
        self.shards = Shards(wanted.of, avoid=wanted.avoid)

    def run(self) -> None:
        pool, shards = self._pool, self.shards
        failed: dict[str, str] = {}  # reader -> why
        bus = pool.bus
        own: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        reader = threading.Thread(target=self._read_own, args=(own,), name="read-own-shard", daemon=True)
        reader.start()
        try:
            while not shards.over and not self._is_old():
                if pool.bus is not bus:  # its watchers know nothing of what the ones before were asked
                    bus = pool.bus
                    shards.here({pool.own_node})
                shards.here(pool.readers() - failed.keys())
                if not shards.readers:
                    raise RuntimeError(f"nobody can read {self._wanted.directory}: {failed}")
                now = time.monotonic()
                for node in sorted(shards.readers):
                    index = shards.next_for(node, now)
                    if index is None:
                        continue
                    self._asked_at.setdefault(index, time.time())
                    own.put(index) if node == pool.own_node else pool.ask(node, self._wanted, self._number, index)
                word = pool.word(LOOK_EVERY_S)
                if word is not None and word.number == self._number:
                    self._take(word, failed)
        finally:
            self._over = True
            own.put(None)
            reader.join(OWN_END_WITHIN_S)  # it may hang in a read: the others' words are enough

    def _take(self, word: _Word, failed: dict[str, str]) -> None:
        now = time.monotonic()
        if word.error:
            failed[word.reader] = word.error
            self._pool.note(word.reader, f"cannot read shards of step directories: {word.error}")
            self.shards.failed(word.reader)
        elif word.found is None:
            self.shards.receive(word.reader, word.index, word.bytes_read, now)
        else:
            # the instant of the asking is by our own clock, and before the reading
            began_at = min(word.found.began_at, self._asked_at.get(word.index, 0.0))
            self.shards.done(word.reader, dataclasses.replace(word.found, began_at=began_at), now)

    def _read_own(self, wanted: queue.SimpleQueue[int | None]) -> None:
        node, number = self._pool.own_node, self._number
        while (index := wanted.get()) is not None:
            far = _Far(self._pool, _Word(reader=node, number=number, index=index))
            reading = Reading(
                bytes_per_s=self._pool.limits.bytes_per_s,
                from_disk=self._wanted.from_disk,
                first_only=True,
                should_stop=lambda: self._over or self._is_old(),
                on_read=far.add,
            )
            try:
                found = verify_shard(self._wanted.directory, index, self._wanted.of, reading=reading)
            except Exception as error:  # noqa: BLE001 - another reader takes over; with none, the deadline decides
                self._pool.put(msgspec.structs.replace(far.word, error=repr(error)))
                continue
            if not reading.should_stop():
                self._pool.put(msgspec.structs.replace(far.word, bytes_read=found.bytes_read, found=found))


class _Far:
    """Tells how far our own shard is, now and then."""

    def __init__(self, pool: VerifyPool, word: _Word) -> None:
        self.word = word
        self._pool = pool
        self._bytes = 0
        self._told_at = time.monotonic()
        self._lock = threading.Lock()

    def add(self, count: int) -> None:
        with self._lock:
            self._bytes += count
            if time.monotonic() - self._told_at < 1.0:
                return
            self._told_at = time.monotonic()
        self._pool.put(msgspec.structs.replace(self.word, bytes_read=self._bytes))
