"""`metrics.csv`: one line a step, written by rank 0.

Losses are printed so that they read back exactly.  A later row of the same step supersedes the earlier.
A thread writes the rows: a disk that is full or hangs costs training nothing, and rows wait until it works.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections import deque
from typing import TYPE_CHECKING

from stepkeeper_trainer.errors import RunDirectoryError
from stepkeeper_trainer.formats.durable import write_all
from stepkeeper_trainer.log import say, warn

if TYPE_CHECKING:
    from pathlib import Path

METRICS_NAME = "metrics.csv"
HEADER = "step,loss,tokens,lr,grad_norm,time,attempt,launch"
ROWS_WAITING_MAX = 100_000
SYNC_WITHIN_S = 30.0  # a save waits so long for its rows
LAST_ROWS_WITHIN_S = 5.0  # a process that ends does
RETRY_S = 0.5
REOPEN_AFTER = 4  # failures in a row: a descriptor that has gone stale does not come back by itself


class Metrics:
    """Takes rows at once, and writes them in order beside training."""

    def __init__(self, run_directory: Path, attempt: int, launch: int) -> None:
        """Open the file; a torn last line of a killed writer is closed.

        Raises:
            RunDirectoryError: it cannot be opened.
        """
        self._tail = f"{attempt},{launch}\n"
        self._changed = threading.Condition()
        self._waiting: deque[str] = deque()
        self._batch: list[str] = []  # of the writing thread
        self._given = self._durable = self._wanted = 0  # lines: taken, on disk, to be on disk soon
        self._lost = 0
        self._torn = False
        self._failures = 0  # in a row
        self._path = run_directory / METRICS_NAME
        try:
            self._descriptor, self._torn, empty = _open(self._path)
        except OSError as error:
            raise RunDirectoryError(f"{self._path}: cannot be opened: {error.strerror}; mend it") from error
        if empty:
            self._put(f"{HEADER}\n")
        threading.Thread(target=self._work, name="stepkeeper-metrics", daemon=True).start()
        atexit.register(self._last_rows, os.getpid())

    def row(
        self,
        step: int,
        loss: float | None,
        tokens: int,
        lr: float | None,
        grad_norm: float | None,
        *,
        at: float | None = None,
    ) -> None:
        """Take the row of a step, completed at `at` (Unix seconds).  Never blocks."""
        values = (_text(loss), str(tokens), _text(lr), _text(grad_norm), f"{at or time.time():.3f}")
        self._put(f"{step},{','.join(values)},{self._tail}")

    def sync(self, limit_at: float | None = None) -> bool:
        """Make all rows taken so far durable; true if they are.

        Args:
            limit_at: when the caller must be done, Unix seconds: half of the time is left to it.
        """
        within_s = SYNC_WITHIN_S
        if limit_at is not None:
            within_s = min(within_s, max(0.0, limit_at - time.time()) / 2)
        return self._sync(within_s)

    def finish(self) -> bool:
        """Make the last rows durable, if that takes no longer than a process may linger; true if they are."""
        return self._sync(LAST_ROWS_WITHIN_S)

    def _sync(self, within_s: float) -> bool:
        with self._changed:
            target = self._given
            self._wanted = max(self._wanted, target)
            self._changed.notify_all()
            done = self._changed.wait_for(lambda: self._durable >= target, within_s)
            missing = target - self._durable
        if not done:
            warn("metrics_unsynced", rows=missing, why="not written in time")
        return done

    def _last_rows(self, pid: int) -> None:
        if os.getpid() == pid:  # a forked child has neither the thread nor the lock
            self.finish()

    def _put(self, line: str) -> None:
        with self._changed:
            if len(self._waiting) >= ROWS_WAITING_MAX:
                self._waiting.popleft()
                self._lost += 1
                if self._lost == 1:
                    warn("metrics_lost", why=f"{ROWS_WAITING_MAX} rows wait for the disk: the oldest are dropped")
            self._waiting.append(line)
            self._given += 1
            self._changed.notify_all()

    def _work(self) -> None:
        upto = 0  # lines that are written once the batch is
        while True:
            with self._changed:
                while not (self._batch or self._waiting or self._wanted > self._durable):
                    self._changed.wait()
                if not self._batch:
                    self._batch = list(self._waiting)
                    self._waiting.clear()
                    upto = self._given
                wanted = self._wanted > self._durable
            try:
                self._write(self._batch)
                self._batch = []
                if wanted:
                    os.fsync(self._descriptor)
                    with self._changed:
                        self._durable = upto
                        self._changed.notify_all()
                self._failures = 0
            except OSError as error:
                self._failures += 1
                if self._failures == 1:
                    warn("metrics_unwritten", file=self._path, why=error.strerror)
                time.sleep(RETRY_S)
                if self._failures % REOPEN_AFTER == 0:
                    self._reopen()

    def _reopen(self) -> None:
        """Open the file anew: its server has restarted, perhaps, or it was moved away."""
        try:
            descriptor, torn, empty = _open(self._path)
        except OSError:
            return  # told already; the old one is tried again
        os.close(self._descriptor)
        self._descriptor, self._torn = descriptor, torn
        if empty:
            self._batch.insert(0, f"{HEADER}\n")
        say("metrics_reopened", file=self._path)

    def _write(self, lines: list[str]) -> None:
        if not lines:
            return
        data = ("\n" if self._torn else "") + "".join(lines)
        self._torn = True  # perhaps in the middle of a row: that line is closed before it is said again
        write_all(self._descriptor, data.encode())
        self._torn = False


def _open(path: Path) -> tuple[int, bool, bool]:
    """Return a descriptor, whether the last line is torn, and whether there is none.  Raises OSError."""
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
    try:
        size = os.fstat(descriptor).st_size
        return descriptor, size > 0 and os.pread(descriptor, 1, size - 1) != b"\n", size == 0
    except OSError:
        os.close(descriptor)
        raise


def _text(value: float | None) -> str:
    return "" if value is None else repr(value)
