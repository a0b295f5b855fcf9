"""`stepkeeper status --follow`: a run, live: a screen that redraws itself, or lines where there is no terminal."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator

import msgspec

from stepkeeper import printing
from stepkeeper.run_analytics import queue, reading
from stepkeeper.run_analytics.glance import Glance, changed_at, glance, line, place
from stepkeeper.run_analytics.model import Accounts, micro
from stepkeeper.run_analytics.queue import Queued
from stepkeeper.run_analytics.screen import screen
from stepkeeper.run_store.journal import Record
from stepkeeper.run_store.paths import RunDirectory

EVERY_S = 1.0
PROGRESS_EVERY_S = 10.0  # a line of progress at most, where there is no terminal
ACCOUNTS_EVERY_S = 2.0
ACCOUNTS_TIMES = 30  # and never more than a thirtieth of the time is spent on them
SLURM_EVERY_S = 20.0  # of a job that waits: many people may follow runs
SLURM_WITHIN_S = 5.0
ENTER, LEAVE = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"  # another screen without a cursor, and back
TOP, REST, BELOW = "\x1b[H", "\x1b[K", "\x1b[J"


def follow(run: RunDirectory, *, sleep: Callable[[float], None] = time.sleep) -> None:
    """Show a run until it is over for good, or somebody presses Ctrl-C.

    Raises:
        OSError: the run directory cannot be read.
    """
    with leaving():
        if sys.stdout.isatty() and os.environ.get("TERM", "") not in ("", "dumb"):
            _draw(run, sleep)
        else:
            _tell(run, sleep)


@contextlib.contextmanager
def leaving() -> Iterator[None]:
    """End the block without an error at Ctrl-C, SIGTERM and SIGHUP."""
    signals = (signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, signal.default_int_handler) for number in signals}
    try:
        yield
    except KeyboardInterrupt:
        pass  # somebody has seen enough
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Look:
    """The newest look; the files are read again only when they have changed."""

    def __init__(self, run: RunDirectory) -> None:
        self._run = run
        self._changed_at: object = None
        self._seen = Glance(status=None)
        self._queued: Queued | None = None
        self._ask_at = 0.0

    def look(self) -> Glance:
        """Look at the run, and ask Slurm where only Slurm can tell.

        Raises:
            OSError: the run directory cannot be read.
        """
        changed = changed_at(self._run)
        if changed != self._changed_at:
            self._seen, self._changed_at = glance(self._run), changed
        return msgspec.structs.replace(self._seen, queued=self._ask(self._seen.asks_slurm(time.time())))

    def _ask(self, job: str | None) -> Queued | None:
        """Return what Slurm said last of a job; it is asked now and then."""
        if job is None:
            return None
        known = self._queued is not None and self._queued.job == job
        if not known or time.monotonic() >= self._ask_at:
            self._queued = queue.query(job, SLURM_WITHIN_S)
            self._ask_at = time.monotonic() + SLURM_EVERY_S
        return self._queued


class _Accounts:
    """Where the time went: read anew now and then, and the less often the longer it takes."""

    def __init__(self, run: RunDirectory) -> None:
        self._reader = reading.Reader(run)
        self._due_at = 0.0
        self._until = 0  # of the newest, microseconds
        self.newest: Accounts | None = None

    def look(self) -> Accounts | None:
        began = time.monotonic()
        if began >= self._due_at:
            seen = self._reader.see()
            self.newest, self._until = seen.accounts, seen.until
            took = time.monotonic() - began
            self._due_at = began + max(ACCOUNTS_EVERY_S, ACCOUNTS_TIMES * took)
        return self.newest

    def as_of(self, seen: Glance, now: float) -> Accounts | None:
        """Return the newest ones; while a job waits in the queue that time counts, though nobody writes of it."""
        waits = seen.waiting is not None and not seen.is_over
        if self.newest is None or not waits or not self.newest.wall_total:
            return self.newest
        return self.newest.with_queue(max(0, micro(now) - self._until))

    def look_again(self) -> None:
        """Read them now: the run is over, and these are the last ones."""
        self._due_at = 0.0
        self.look()


def _draw(run: RunDirectory, sleep: Callable[[float], None]) -> None:
    plain = "utf" not in (sys.stdout.encoding or "").lower()
    accounts, look = _Accounts(run), Look(run)
    last: list[str] = []
    over = False
    sys.stdout.write(ENTER)
    try:
        while True:
            seen = look.look()
            now, size = time.time(), shutil.get_terminal_size((80, 24))
            last = screen(
                str(run.path),
                seen,
                accounts.as_of(seen, now),
                now=now,
                width=size.columns,
                height=size.lines,
                plain=plain,
            )
            sys.stdout.write(TOP + f"{REST}\r\n".join(last) + REST + BELOW)
            sys.stdout.flush()
            if over:
                break
            # a long run's accounts take seconds: what is quick to know stands there already
            before, over = accounts.newest, seen.is_over
            if over:
                accounts.look_again()
            elif accounts.look() is before:
                sleep(EVERY_S)
    finally:
        sys.stdout.write(LEAVE)
        sys.stdout.flush()
    for each in last:  # what was seen last stays in the terminal
        printing.say(each)


def _tell(run: RunDirectory, sleep: Callable[[float], None]) -> None:
    """Print what is new: each decision once, and progress now and then."""
    shown: Record | None = None
    step: object = None
    progress_due_at = 0.0
    look = Look(run)
    while True:
        seen = look.look()
        for record in _new(seen, shown):
            at = printing.instant(record.event.at)
            printing.say(f"{at}  {place(record):<6} {record.phase.value:<10}  {record.why}")
            shown = record
        now = time.time()
        status, queued = seen.status, seen.queued
        newest = (
            (status.attempt, status.launch, status.step) if status is not None else None,
            (queued.job, queued.state, queued.reason) if queued is not None else None,
        )
        if newest != step and time.monotonic() >= progress_due_at:
            printing.say(line(seen, now))
            step, progress_due_at = newest, time.monotonic() + PROGRESS_EVERY_S
        sys.stdout.flush()
        if seen.is_over:
            return
        sleep(EVERY_S)


def _new(seen: Glance, shown: Record | None) -> tuple[Record, ...]:
    if shown is None or shown not in seen.decisions:
        return seen.decisions[-5:] if shown is None else seen.decisions
    return seen.decisions[seen.decisions.index(shown) + 1 :]
