"""One step from one tier to another: chunks are checked on their way, and what is there is not sent again.

A limit on bytes per second, shared by all that copy at once.

Where an urgent save is written first: pure, from measured rates.

`Mover` copies committed steps beside training, on one thread.  The newest step is what counts: where the copies cannot
keep up, older ones that still wait are left out.  A failure is told, tried again, and never harms training or what is
already copied.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
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

    Args:
        source: where it is.
        held: which one.
        target: where it goes.
        pace: at most so fast.
        should_stop: asked between chunks.
        before_commit: the last word before the step counts; it raises where it must not (a newer attempt rules).
        despite: directories of the target that are damaged: a copy there is no reason not to make another.

    Raises:
        DamagedCopyError: the source's bytes are wrong, or the target's read back otherwise: nothing was committed.
        CopyStoppedError: it was asked to stop.
        TierError: files are missing, or a tier does not answer.
        OSError: a disk refuses.
    """
    staging = target.staging(held, despite=despite)
    pushed = _Push(source, held, pace or Pace(), should_stop).to(staging, held.manifest.files)
    if missing := pushed.missing:
        raise TierError(f"{held.directory}: {target.name} lacks {len(missing)} files, such as {missing[0]}")
    before_commit()
    return Pushed(staging.commit(), pushed.bytes_copied, pushed.bytes_there)


def push_files(
    source: Tier,
    held: Held,
    target: Tier,
    *,
    files: Collection[str] | None = None,
    pace: Pace | None = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> Pushed:
    """Copy the files that `source` has, without a commit: each node does so with its own share of a step.

    The caller that knows that all are there commits (`target.staging(held).commit()`).  Raises as `copy_step`.
    """
    chosen = held.manifest.files if files is None else files
    return push(source, held, target.staging(held), chosen, pace=pace, should_stop=should_stop)


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
    return _Push(source, held, pace or Pace(), should_stop).to(staging, files)


@dataclass(frozen=True, slots=True)
class _Push:
    source: Tier
    held: Held
    pace: Pace
    should_stop: Callable[[], bool]

    def to(self, staging: Receiving, files: Collection[str]) -> Pushed:
        """Send what is not there."""
        copied = there = 0
        missing = []
        for name, entry in self.held.manifest.files.items():
            if name not in files:
                continue
            check_entry(entry, where=self._where(name))
            if staging.done(name, entry):
                there += entry.bytes
                continue
            if not self.source.has_file(self.held, name, entry):
                missing.append(name)
                continue
            first = staging.present(name, entry)
            done = min(first * entry.chunk_bytes, entry.bytes)
            staging.write(name, entry, first, self._checked(name, entry, first))
            there += done
            copied += entry.bytes - done
        return Pushed(None, copied, there, tuple(missing))

    def _checked(self, name: str, entry: FileEntry, first: int) -> Iterator[bytes]:
        """Yield chunks that are right, and all of them."""
        where = self._where(name)
        index = first
        if first < len(entry.chunks):
            for chunk in self.source.chunks(self.held, name, entry, first):
                if self.should_stop():
                    raise CopyStoppedError(f"{where}: stopped at chunk {index}")
                check_chunk(chunk, entry, index, where=where)
                self.pace.take(len(chunk))
                yield chunk
                index += 1
        if index != len(entry.chunks):
            raise TierError(f"{where}: ends after {index} of {len(entry.chunks)} chunks")

    def _where(self, name: str) -> str:
        return f"{self.source.name}/{self.held.directory}/{name}"


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
        """Nothing is known."""
        self.bytes_per_s: float | None = None

    def measured(self, size: int, seconds: float) -> None:
        """Take in one measurement; too small a one says nothing."""
        if size < 1 or seconds <= 0:
            return
        now = size / seconds
        self.bytes_per_s = now if self.bytes_per_s is None else (self.bytes_per_s + now) / 2


RETRY_S, RETRY_MAX_S = 5.0, 300.0
TRIES_MAX = 6  # of one copy; the next step is tried anyway


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of a step on its way from one tier to the next."""

    save_id: str
    step: int
    source: str
    target: str
    directory: str | None = None  # in the target; None where it failed, or was left out
    bytes_copied: int = 0
    seconds: float = 0.0
    error: str = ""
    left_out: bool = False  # a newer one was waiting


class Mover:
    """One a process: `offer` returns at once, `wait` is for the end."""

    def __init__(
        self,
        tiers: Sequence[Tier],
        *,
        pace: Pace | None = None,
        report: Callable[[Outcome], None] = lambda _outcome: None,
        before_commit: Callable[[], None] = lambda: None,
        counts: Callable[[Held], bool] = lambda _held: True,
        retry_s: float = RETRY_S,
    ) -> None:
        """Start the thread.

        Args:
            tiers: in the order of copies: the first is where steps are committed.
            pace: of all copies together.
            report: called on the mover's thread with each outcome.
            before_commit: raises where this process must not commit any more.
            counts: whether a step is still on the run's lineage: one that was rolled back is not copied on.
            retry_s: after a failure; it doubles up to five minutes.
        """
        assert len(tiers) > 1, "there is nothing to copy between"
        self._tiers, self._pace, self._report = list(tiers), pace or Pace(), report
        self._before_commit, self._counts, self._retry_s = before_commit, counts, retry_s
        self._changed = threading.Condition()
        self._waiting: list[tuple[int, Held]] = []  # the tier where it is, oldest first
        self._arrived: dict[str, int] = {}  # save_id: the last tier that has it
        self._stopping = False
        self._thread = threading.Thread(target=self._work, name="stepkeeper-mover", daemon=True)
        self._thread.start()

    def offer(self, held: Held) -> None:
        """Have a step of the first tier copied."""
        with self._changed:
            self._waiting.append((0, held))
            self._changed.notify_all()

    def wait(self, save_id: str, tier: int, limit_at: float) -> bool:
        """Wait until tier number `tier` has a step, at most until `limit_at` (monotonic); true if it has."""
        with self._changed:
            return (
                self._changed.wait_for(
                    lambda: self._arrived.get(save_id, 0) >= tier or self._stopping,
                    max(0.0, limit_at - time.monotonic()),
                )
                and self._arrived.get(save_id, 0) >= tier
            )

    def close(self, within_s: float) -> bool:
        """Stop between two chunks; a next mover goes on there.  True if the thread has ended."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self._thread.join(within_s)
        return not self._thread.is_alive()

    def _work(self) -> None:
        failures = 0  # of the copy at hand, in a row
        while True:
            with self._changed:
                if failures:
                    delay_s = min(RETRY_MAX_S, self._retry_s * 2 ** (failures - 1))
                    self._changed.wait_for(lambda: self._stopping, delay_s)
                self._changed.wait_for(lambda: self._waiting or self._stopping)
                if self._stopping:
                    return
                left_out = self._drop_older()
                number, held = self._waiting[0]
            for each in left_out:
                self._report(each)
            outcome = self._copy(number, held)
            if outcome is None:
                return  # it was asked to stop
            failures = failures + 1 if outcome.error else 0
            with self._changed:
                if not outcome.error or failures == TRIES_MAX:
                    failures = 0
                    self._waiting.remove((number, held))
                if outcome.directory is not None:
                    self._arrived[held.manifest.save_id] = number + 1
                    if number + 2 < len(self._tiers):
                        self._waiting.append((number + 1, replace(held, directory=outcome.directory)))
                self._changed.notify_all()
            self._report(outcome)

    def _drop_older(self) -> list[Outcome]:
        """Keep the newest of those that wait in each tier; first come first served among tiers."""
        newest = dict(self._waiting)  # the later one replaces the earlier
        dropped = [(number, held) for number, held in self._waiting if newest[number] is not held]
        self._waiting = [(number, held) for number, held in self._waiting if newest[number] is held]
        return [self._outcome(number, held, left_out=True) for number, held in dropped]

    def _copy(self, number: int, held: Held) -> Outcome | None:
        began = time.monotonic()
        try:
            if not self._counts(held):
                return self._outcome(number, held, left_out=True)
            pushed = copy_step(
                self._tiers[number],
                held,
                self._tiers[number + 1],
                pace=self._pace,
                should_stop=lambda: self._stopping,
                before_commit=self._before_commit,
            )
        except CopyStoppedError:
            return None
        except Exception as error:  # noqa: BLE001 - told, tried again; training must go on
            text = str(error) if isinstance(error, TierError) else f"{type(error).__name__}: {error}"
            return self._outcome(number, held, error=text, seconds=time.monotonic() - began)
        return self._outcome(
            number,
            held,
            directory=pushed.directory,
            bytes_copied=pushed.bytes_copied,
            seconds=time.monotonic() - began,
        )

    def _outcome(self, number: int, held: Held, **more: object) -> Outcome:
        return Outcome(
            save_id=held.manifest.save_id,
            step=held.manifest.step,
            source=self._tiers[number].name,
            target=self._tiers[number + 1].name,
            **more,  # type: ignore[arg-type]
        )
