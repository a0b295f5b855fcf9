"""The one queue between threads and a loop, and the threads that put something there."""

from __future__ import annotations

import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Collection
from typing import Generic, TypeVar

import msgspec

from stepkeeper.core.events import JobFacts

# Signals reach a loop at once, also in the moment in which it goes to sleep.
#
# Python runs a handler on the main thread, when that runs next.  A signal that comes between its last look and its
# wait would be seen only when the wait is over: so the bytes that Python writes for each signal are read by a thread.


def listen_for_signals(
    numbers: Collection[signal.Signals],
    on_signal: Callable[[signal.Signals], None],
    run_thread: Callable[[str, Callable[[], object]], object],
) -> None:
    """Call `on_signal` for each of these signals, on a thread.  Once a process, on the main thread.

    Args:
        numbers: which.
        on_signal: what to do.
        run_thread: starts a thread with a name; what that raises must reach the loop.
    """
    reader, writer = os.pipe2(os.O_CLOEXEC)
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    for number in numbers:
        signal.signal(number, lambda *_: None)  # without a handler Python writes no byte

    def read() -> None:
        while found := os.read(reader, 64):
            for number in found:
                if number in numbers:
                    on_signal(signal.Signals(number))

    run_thread("signals", read)


# Noticing that this process did not run for a while: suspended by Slurm, stopped by a signal, or frozen.
#
# Code that times out others asks here first: messages that could not be received meanwhile were not late.

LATE_S = 5.0  # a loop that does nothing slow comes late by less, also on a busy node


class Stalls:
    """Watches one loop.  Seconds are those of a monotonic clock, which goes on while a process is suspended."""

    def __init__(self, now: float) -> None:
        """Begin now."""
        self._seen = now
        self._allowed = 0.0

    def waits(self, seconds: float) -> None:
        """Expect the next look so many seconds later: the loop is about to wait."""
        self._allowed = max(0.0, seconds)

    def look(self, now: float) -> float:
        """Return for how long the loop has not run; 0.0 where it came in time."""
        away = now - self._seen
        late = away - self._allowed
        self._seen, self._allowed = now, 0.0
        return away if late > LATE_S else 0.0


# Time: Unix seconds that never go backwards, and how the clocks of others stand to them.

SET_LEAST_S = 1.5  # a wall clock that goes apart from ours by less is not taken for set; Slurm gives whole seconds


class Clock:
    """Anchored to the wall clock once; afterwards it only follows the monotonic one.

    Deadlines of our own need nothing else.  Slurm's times are of its controller's clock: they are put among ours by how
    that clock stands to this one, as it said last, or by the wall clock where it has not said.
    """

    def __init__(self, wall: Callable[[], float] = time.time, monotonic: Callable[[], float] = time.monotonic) -> None:
        """Begin now."""
        self._wall, self._monotonic = wall, monotonic
        self._offset = wall() - monotonic()
        self._lock = threading.Lock()
        self._wall_ahead_s = 0.0  # as of the newest `was_set`
        self._slurm_ahead_s = 0.0

    def now(self) -> float:
        """Return Unix seconds."""
        return self._monotonic() + self._offset

    def to_wall(self, at: float) -> float:
        """Return an instant of ours as the wall clock shows it now, which somebody may have set since."""
        return at - self.now() + self._wall()

    def was_set(self) -> bool:
        """Tell whether somebody has set the wall clock since the last time that this was asked."""
        ahead_s = self._wall() - self.now()
        with self._lock:
            if abs(ahead_s - self._wall_ahead_s) < SET_LEAST_S:
                return False
            self._wall_ahead_s = ahead_s
            return True

    def slurm_set(self, slurm_now: float | None) -> float:
        """Return by how much Slurm's clock has moved among our instants since the last time; None: it did not say."""
        by_wall = self._wall_ahead_s
        ahead_s = by_wall if slurm_now is None else slurm_now - self.now()
        with self._lock:
            moved_s = ahead_s - self._slurm_ahead_s
        return float(round(moved_s)) if abs(moved_s) >= SET_LEAST_S else 0.0

    def follow_slurm(self, seconds: float) -> None:
        """Read Slurm's times by a clock that has moved by so much."""
        with self._lock:
            self._slurm_ahead_s += seconds

    def from_slurm(self, job: JobFacts) -> JobFacts:
        """Return the facts of a job with their times among ours."""
        by = self._slurm_ahead_s
        if not by:
            return job
        preempt_at = None if job.preempt_at is None else job.preempt_at - by
        end_at = None if job.end_at is None else job.end_at - by
        return msgspec.structs.replace(job, preempt_at=preempt_at, end_at=end_at)


Item = TypeVar("Item")


class SourceError(Exception):
    """A thread of ours failed: a mistake of ours, raised again in the loop."""


class Inbox(Generic[Item]):
    """Items on their way to the loop."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self._queue: queue.SimpleQueue[Item | BaseException] = queue.SimpleQueue()

    def put(self, item: Item) -> None:
        """Hand over one item."""
        self._queue.put(item)

    def fail(self, error: BaseException) -> None:
        """Have the loop raise what went wrong elsewhere."""
        self._queue.put(error)

    def get(self, within_s: float) -> Item | None:
        """Return the next item, or None when none came in time.

        Raises:
            SourceError: a thread failed.
        """
        try:
            item = self._queue.get(timeout=max(0.0, within_s))
        except queue.Empty:
            return None
        if isinstance(item, BaseException):
            raise SourceError(f"a thread failed: {item!r}") from item
        return item

    def run_thread(self, name: str, work: Callable[[], object]) -> threading.Thread:
        """Run `work` on a thread; whatever it raises reaches the loop with its own traceback."""

        def guarded() -> None:
            try:
                work()
            except BaseException as error:  # noqa: BLE001 - handed to the loop, which raises it
                self.fail(error)

        thread = threading.Thread(target=guarded, name=name, daemon=True)
        thread.start()
        return thread
