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
from stepkeeper_trainer.log import warn

if TYPE_CHECKING:
    from pathlib import Path

METRICS_NAME = "metrics.csv"
HEADER = "step,loss,tokens,lr,grad_norm,time,attempt,launch"
ROWS_WAITING_MAX = 100_000
SYNC_WITHIN_S = 30.0  # a save waits so long for its rows
LAST_ROWS_WITHIN_S = 5.0  # a process that ends does
RETRY_S = 0.5


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
        self._given = self._durable = self._wanted = 0  # lines: taken, on disk, to be on disk soon
        self._lost = 0
        self._torn = False
        self._in_trouble = False
        path = run_directory / METRICS_NAME
        try:
            self._descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
            size = os.fstat(self._descriptor).st_size
            if size == 0:
                self._put(f"{HEADER}\n")
            else:
                self._torn = os.pread(self._descriptor, 1, size - 1) != b"\n"
        except OSError as error:
            raise RunDirectoryError(f"{path}: cannot be opened: {error.strerror}; mend it") from error
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
        batch: list[str] = []
        upto = 0  # lines that are written once the batch is
        while True:
            with self._changed:
                while not (batch or self._waiting or self._wanted > self._durable):
                    self._changed.wait()
                if not batch:
                    batch = list(self._waiting)
                    self._waiting.clear()
                    upto = self._given
                wanted = self._wanted > self._durable
            try:
                self._write(batch)
                batch = []
                if wanted:
                    os.fsync(self._descriptor)
                    with self._changed:
                        self._durable = upto
                        self._changed.notify_all()
                self._in_trouble = False
            except OSError as error:
                if not self._in_trouble:
                    warn("metrics_unwritten", why=error.strerror)
                self._in_trouble = True
                time.sleep(RETRY_S)

    def _write(self, lines: list[str]) -> None:
        if not lines:
            return
        data = ("\n" if self._torn else "") + "".join(lines)
        self._torn = True  # perhaps in the middle of a row: that line is closed before it is said again
        write_all(self._descriptor, data.encode())
        self._torn = False


def _text(value: float | None) -> str:
    return "" if value is None else repr(value)
