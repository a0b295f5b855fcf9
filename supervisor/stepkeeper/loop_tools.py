"""The one queue between threads and a loop, and the threads that put something there."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection
from typing import Generic, ParamSpec, TypeVar

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

LOOK_EVERY_S = 0.1  # at a queue of which nothing is taken
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


class RateLimiter:
    """Grants `burst` at once, and `per_s` more each second, never more than `burst` in store."""

    __slots__ = ("_at", "_burst", "_per_s", "_stored")

    def __init__(self, per_s: float, burst: float) -> None:
        self._per_s = per_s
        self._burst = self._stored = burst
        self._at: float | None = None

    def take(self, now: float) -> bool:
        """Take one, if there is one.

        >>> limiter = RateLimiter(per_s=0.1, burst=2)
        >>> [limiter.take(at) for at in (0.0, 0.1, 0.2, 10.3, 10.4)]
        [True, True, False, True, False]
        """
        if self._at is not None:
            self._stored = min(self._burst, self._stored + max(0.0, now - self._at) * self._per_s)
        self._at = now
        if self._stored < 1.0:
            return False
        self._stored -= 1.0
        return True


ERROR_CHARACTERS_MAX = 300
Item = TypeVar("Item")
Result = TypeVar("Result")
Arguments = ParamSpec("Arguments")
Report = Callable[[str, BaseException, str], None]  # of a part, what it raised, and the traceback of that


class SourceError(Exception):
    """A thread of ours failed: a mistake of ours, raised again in the loop."""


def to_stderr(part: str, error: BaseException, trace: str) -> None:
    """Say it where no log is there, or the log is what failed."""
    if sys.stderr is not None:
        with contextlib.suppress(OSError, ValueError):  # a full disk below it, or a closed one
            sys.stderr.write(f"stepkeeper: {part} failed: {error!r}\n{trace}")


def shown(error: BaseException) -> str:
    """Return an error in one line."""
    return f"{type(error).__name__}: {error}".replace("\n", " ")[:ERROR_CHARACTERS_MAX]


def reraise(error: BaseException) -> None:
    """Raise what nobody takes: the thread ends with a traceback."""
    raise error


def thread(name: str, work: Callable[[], object], on_failure: Callable[[BaseException], object]) -> threading.Thread:
    """Return a thread, not started yet; whatever `work` raises is handed over, and the thread ends with it."""

    def guarded() -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - handed over
            on_failure(error)

    return threading.Thread(target=guarded, name=name, daemon=True)


def patiently(read: Callable[[], Result], within_s: float) -> Result | None:
    """Return what a reading brings; storage that hangs has nothing to say."""
    found: list[Result] = []
    reader = threading.Thread(target=lambda: found.append(read()), name="reading", daemon=True)
    reader.start()
    reader.join(within_s)
    return found[0] if found else None


class Inbox(Generic[Item]):
    """Items on their way to the loop, and what may fail without ending it.

    A thread of `run_thread` is essential: what it raises ends the loop.  A part of `run_optional` or `guard` may fail:
    the log says so once for each kind of error, and the loop goes on.
    """

    def __init__(self, clock: Clock, report: Report = to_stderr) -> None:
        """Begin without items.

        Args:
            clock: of the items.
            report: called once for each kind of failure of an optional part.
        """
        self.clock = clock
        self.report = report
        self._queue: queue.SimpleQueue[Item | BaseException] = queue.SimpleQueue()
        self._failures = threading.Lock()
        self._failed: set[tuple[str, type[BaseException]]] = set()

    def put(self, item: Item) -> None:
        """Hand over one item."""
        self._queue.put(item)

    def fail(self, error: BaseException) -> None:
        """Have the loop raise what went wrong elsewhere."""
        self._queue.put(error)

    def wait_for_item(self, within_s: float) -> bool:
        """Wait until an item is there, and leave it; false where none came in time."""
        until = time.monotonic() + within_s
        while self._queue.empty() and time.monotonic() < until:
            time.sleep(LOOK_EVERY_S)
        return not self._queue.empty()

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
        started = thread(name, work, self.fail)
        started.start()
        return started

    def run_optional(self, part: str, work: Callable[[], object], *, name: str = "") -> threading.Thread:
        """Run a part on a thread that may fail; `name` is the thread's, where the part has several."""

        def guarded() -> None:
            try:
                work()
            except BaseException as error:  # noqa: BLE001 - reported, and the loop goes on
                self.failed(part, error)

        return self.run_thread(name or part, guarded)

    def ask(
        self,
        part: str,
        act: Callable[[], Item | None],
        failed: Callable[[str], Item],
        *,
        expected: tuple[type[Exception], ...] = (),
    ) -> threading.Thread:
        """Run a part for whose item the loop waits, on a thread.

        Args:
            part: which.
            act: returns the item; None where nobody waits for it any more.
            failed: makes the item of what went wrong.
            expected: what the world does wrong, and no mistake of ours: it is not reported besides.
        """

        def guarded() -> None:
            try:
                item = act()
            except expected as error:
                named = isinstance(error, OSError) and error.filename is not None
                item = failed(f"{error.filename}: {error.strerror}" if named else str(error))  # type: ignore[attr-defined]
            except BaseException as error:  # noqa: BLE001 - reported, and the loop goes on
                self.failed(part, error)
                item = failed(shown(error))
            if item is not None:
                self.put(item)

        return self.run_thread(part, guarded)

    def guard(self, part: str, call: Callable[Arguments, Result]) -> Callable[Arguments, Result | None]:
        """Return an optional call that never raises; its result is None where it failed."""

        def guarded(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result | None:
            try:
                return call(*args, **kwargs)
            except Exception as error:  # noqa: BLE001 - reported, and the loop goes on
                self.failed(part, error)
                return None

        return guarded

    def failed(self, part: str, error: BaseException) -> bool:
        """Report a failure of an optional part, each kind once; return whether this one is new."""
        with self._failures:
            known = (part, type(error)) in self._failed
            self._failed.add((part, type(error)))
        if known:
            return False
        trace = "".join(traceback.format_exception(error))
        try:
            self.report(part, error, trace)
        except Exception as broken:  # noqa: BLE001 - the log itself is what failed
            to_stderr(part, error, trace)
            to_stderr("log", broken, "")
        return True

    def watch_threads(self, part: str) -> None:
        """Report what other threads of this process raise, as a failure of this part: nothing else would."""

        def hook(args: threading.ExceptHookArgs) -> None:
            if args.exc_value is not None and not isinstance(args.exc_value, SystemExit):
                self.failed(part, args.exc_value)

        threading.excepthook = hook
