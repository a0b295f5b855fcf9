"""One step from one tier to another: chunks are checked on their way, and what is there is not sent again.

A limit on bytes per second, shared by all that copy at once.

Where an urgent save is written first: pure, from measured rates.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Literal

from stepkeeper_trainer.formats.manifest import FileEntry
from stepkeeper_trainer.tiers.tier import Held, Receiving, Tier, TierError, check_chunk, check_entry


class CopyStoppedError(TierError):
    """Somebody asked to stop; what was copied stays, and a next try goes on there."""


@dataclass(frozen=True, slots=True)
class Pushed:
    """What a copy did."""

    directory: str | None  # its name in the target; None where it was not committed
    bytes_copied: int
    bytes_there: int  # before
    missing: tuple[str, ...] = ()  # of the files that were to go: neither side has them


def copy_step(
    source: Tier,
    held: Held,
    target: Tier,
    *,
    pace: Pace | None = None,
    should_stop: Callable[[], bool] = lambda: False,
    before_commit: Callable[[], None] = lambda: None,
    despite: Collection[str] = (),
) -> Pushed:
    """Copy a whole step and commit it.

    `before_commit` raises where the step must not count (a newer attempt rules).  Directories of `despite` are damaged:
    a copy there is no reason not to make another.

    Raises:
        DamagedCopyError: the source's bytes are wrong, or the target's read back otherwise: nothing was committed.
        CopyStoppedError: it was asked to stop.
        TierError: files are missing, or a tier does not answer.
        OSError: a disk refuses.
    """
    staging = target.staging(held, despite=despite)
    pushed = push(source, held, staging, held.manifest.files, pace=pace, should_stop=should_stop)
    if missing := pushed.missing:
        raise TierError(f"{held.directory}: {target.name} lacks {len(missing)} files, such as {missing[0]}")
    before_commit()
    return Pushed(staging.commit(), pushed.bytes_copied, pushed.bytes_there)


def push(
    source: Tier,
    held: Held,
    staging: Receiving,
    files: Collection[str],
    *,
    pace: Pace | None = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> Pushed:
    """Copy files that `source` has into a step on its way; others' are not looked at.  Raises as `copy_step`."""
    copied = there = 0
    missing = []
    for name, entry in held.manifest.files.items():
        if name not in files:
            continue
        where = f"{source.name}/{held.directory}/{name}"
        check_entry(entry, where=where)
        if staging.done(name, entry):
            there += entry.bytes
            continue
        if not source.has_file(held, name, entry):
            missing.append(name)
            continue
        first = staging.present(name, entry)
        done = min(first * entry.chunk_bytes, entry.bytes)
        chunks = source.chunks(held, name, entry, first) if first < len(entry.chunks) else iter(())
        staging.write(
            name, entry, first, _checked(chunks, entry, first, where=where, pace=pace, should_stop=should_stop)
        )
        there += done
        copied += entry.bytes - done
    return Pushed(None, copied, there, tuple(missing))


def _checked(
    chunks: Iterator[bytes],
    entry: FileEntry,
    first: int,
    *,
    where: str,
    pace: Pace | None,
    should_stop: Callable[[], bool],
) -> Iterator[bytes]:
    """Yield chunks that are right, and all of them from number `first` on."""
    index = first
    for chunk in chunks:
        if should_stop():
            raise CopyStoppedError(f"{where}: stopped at chunk {index}")
        check_chunk(chunk, entry, index, where=where)
        if pace is not None:
            pace.take(len(chunk))
        yield chunk
        index += 1
    if index != len(entry.chunks):
        raise TierError(f"{where}: ends after {index} of {len(entry.chunks)} chunks")


BURST_S = 1.0  # of idle time that may be made up for
LIFTED_WITHIN_S = 0.2  # a copy that waits goes on so soon after the limit is lifted


class Pace:
    """Lets bytes pass at a rate; None lets them pass at once."""

    def __init__(
        self,
        bytes_per_s: float | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Take clock and sleep as they are, or a test's."""
        assert bytes_per_s is None or bytes_per_s > 0, "a rate is more than 0"
        self._rate, self._clock, self._sleep = bytes_per_s, clock, sleep
        self._lock = threading.Lock()
        self._free_at = clock()  # when all bytes so far have had their time
        self.waited_s = 0.0  # by all together

    def lift(self) -> None:
        """Let bytes pass at once from now on: somebody waits for them."""
        self._rate = None

    def take(self, count: int) -> None:
        """Wait until `count` bytes may pass."""
        with self._lock:
            if self._rate is None:
                return
            now = self._clock()
            free_at = self._free_at = max(self._free_at, now - BURST_S) + count / self._rate
            self.waited_s += max(0.0, free_at - now)
        while self._rate is not None and (left_s := free_at - self._clock()) > 0:
            self._sleep(min(left_s, LIFTED_WITHIN_S))


SURE_FACTOR = 1.5  # a write may take so much longer than those before
First = Literal["local", "shared"]


def first_tier(*, leaving: bool, left_s: float | None, size: int, shared_bytes_per_s: float | None) -> First:
    """Say which tier a save goes to first.

    Training that goes on waits for the faster disk only.  A rank that leaves must see its bytes on shared storage,
    and writes them there at once where its time suffices: by way of the local disk they would be written twice.
    Where it does not suffice, the local disk has them at least, and the copy goes as far as it gets.

    Args:
        leaving: the processes end after this save.
        left_s: until the deadline; None: there is none.
        size: bytes of this rank; 0: unknown.
        shared_bytes_per_s: measured in this launch; None: not yet.

    >>> first_tier(leaving=False, left_s=None, size=10**9, shared_bytes_per_s=1e9)
    'local'
    >>> first_tier(leaving=True, left_s=60.0, size=10**9, shared_bytes_per_s=1e9)
    'shared'
    >>> first_tier(leaving=True, left_s=60.0, size=10**11, shared_bytes_per_s=1e9)
    'local'
    >>> first_tier(leaving=True, left_s=60.0, size=10**11, shared_bytes_per_s=None)  # nobody knows: the old way
    'shared'
    """
    if not leaving:
        return "local"
    if left_s is None or shared_bytes_per_s is None:
        return "shared"
    return "shared" if SURE_FACTOR * size / shared_bytes_per_s <= left_s else "local"


class Rate:
    """Bytes per second, of the newest measurements more than of old ones."""

    def __init__(self) -> None:
        self.bytes_per_s: float | None = None

    def measured(self, size: int, seconds: float) -> None:
        """Take in one measurement; too small a one says nothing."""
        if size < 1 or seconds <= 0:
            return
        now = size / seconds
        self.bytes_per_s = now if self.bytes_per_s is None else (self.bytes_per_s + now) / 2
