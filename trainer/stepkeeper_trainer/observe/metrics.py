"""`metrics.csv`: one line a step, written by rank 0.

Losses are printed so that they read back exactly.  A later row of the same step supersedes the earlier.
A thread writes the rows: a disk that is full or hangs costs training nothing, and rows wait until it works.

What rank 0 keeps of each step: a row of metrics and the loss history, complete and exact.

Numbers that a device is still computing: read a step later, when nobody has to wait for them.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.distributed.tensor import DTensor

from stepkeeper_trainer.errors import RunDirectoryError
from stepkeeper_trainer.formats.durable import write_all
from stepkeeper_trainer.log import say, warn
from stepkeeper_trainer.observe.trackers import Trackers, note_mlflow_run

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from stepkeeper_trainer.environment import Environment
    from stepkeeper_trainer.observe.exactness import Replay
    from stepkeeper_trainer.observe.trackers import Tracker
    from stepkeeper_trainer.state import Counters


METRICS_NAME = "metrics.csv"
HEADER = "step,loss,tokens,lr,grad_norm,time,attempt,launch"
ROWS_WAITING_MAX = 100_000
SYNC_WITHIN_S = 30.0  # a save waits so long for its rows
LAST_ROWS_WITHIN_S = 5.0  # a process that ends does
LOOK_EVERY_S = 0.1  # at whether the save is wanted still
RETRY_S = 0.5
REOPEN_AFTER = 4  # failures in a row: a descriptor that has gone stale does not come back by itself


class Metrics:
    """Takes rows at once, and writes them in order beside training."""

    def __init__(self, run_directory: Path, attempt: int, launch: int) -> None:
        """Open the file; a torn last line of a killed writer is closed.  Raises RunDirectoryError."""
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

    def sync(self, limit_at: float | None = None, unwanted: Callable[[], bool] = lambda: False) -> bool:
        """Make all rows taken so far durable; true if they are.

        With a limit (Unix seconds) half of the time is left to the caller, who may find it `unwanted` meanwhile.
        """
        within_s = SYNC_WITHIN_S
        if limit_at is not None:
            within_s = min(within_s, max(0.0, limit_at - time.time()) / 2)
        return self._sync(within_s, unwanted)

    def finish(self) -> bool:
        """Make the last rows durable, if that takes no longer than a process may linger; true if they are."""
        return self._sync(LAST_ROWS_WITHIN_S)

    def _sync(self, within_s: float, unwanted: Callable[[], bool] = lambda: False) -> bool:
        until = time.monotonic() + within_s
        with self._changed:
            target = self._given
            self._wanted = max(self._wanted, target)
            self._changed.notify_all()
            while self._durable < target and not unwanted() and (left_s := until - time.monotonic()) > 0:
                self._changed.wait(min(left_s, LOOK_EVERY_S))
            missing = target - self._durable
        done = missing <= 0
        if not done and not unwanted():
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


@dataclass(frozen=True, slots=True)
class _Step:
    step: int
    tokens: int
    loss: Later
    lr: Later
    grad_norm: Later
    at: float  # Unix seconds
    others: Mapping[str, float] | None = None


class Records:
    """Numbers of a device are taken in at the next boundary, or when a save needs them."""

    def __init__(
        self, counters: Counters, metrics: Metrics, trackers: Trackers | None = None, *, run_directory: Path
    ) -> None:
        self._counters, self._metrics, self._trackers = counters, metrics, trackers
        self._run_directory = run_directory
        self._noted = trackers is not None  # what the run is called there, the tracker itself keeps
        self._open: _Step | None = None
        self.replay: Replay | None = None  # is told of each loss

    def step(self, loss: Number, lr: Number, grad_norm: Number, others: Mapping[str, float] | None = None) -> None:
        """Record the step that `counters` is at; `others` are for the tracker."""
        self.settle()
        if not self._noted:
            self._noted = True
            note_mlflow_run(self._run_directory)
        counters = self._counters
        step = _Step(counters.step, counters.tokens, Later(loss), Later(lr), Later(grad_norm), time.time(), others)
        self._open = step
        if step.loss.ready and step.lr.ready and step.grad_norm.ready:
            self.settle()

    def settle(self) -> None:
        """Take in the newest step."""
        step, self._open = self._open, None
        if step is None:
            return
        loss = step.loss.read()
        if loss is not None:
            self._counters.history.append((step.step, loss))
            if self.replay is not None:
                self.replay.observe(step.step, loss)
        lr, grad_norm = step.lr.read(), step.grad_norm.read()
        self._metrics.row(step.step, loss, step.tokens, lr, grad_norm, at=step.at)
        if self._trackers is not None:
            values = {"loss": loss, "tokens": float(step.tokens), "lr": lr, "grad_norm": grad_norm}
            self._trackers.row(step.step, values | (dict(step.others) if step.others else {}))

    def sync(self, limit_at: float, unwanted: Callable[[], bool]) -> object:
        """Make the rows so far durable, by `limit_at` (Unix seconds), unless that becomes `unwanted`."""
        return self._metrics.sync(limit_at, unwanted)

    def finish(self, *, finished: bool) -> None:
        """Make the last rows durable, if that takes no longer than a process may linger."""
        with contextlib.suppress(RuntimeError):  # the device may be what has failed
            self.settle()
        self._metrics.finish()
        if self._trackers is not None:
            self._trackers.close(finished=finished)


def begin_records(
    counters: Counters, run_directory: Path, environment: Environment, tracker: Tracker | None
) -> Records:
    """Open `metrics.csv`, and have a tracker hear what is written there.  Raises RunDirectoryError."""
    metrics = Metrics(run_directory, environment.attempt, environment.launch)
    trackers = Trackers(tracker, run_directory) if tracker is not None else None
    return Records(counters, metrics, trackers, run_directory=run_directory)


Number = float | torch.Tensor | None


def whole(value: Number) -> Number:
    """Return a sharded number as a plain tensor; all ranks call it."""
    return value.full_tensor() if isinstance(value, DTensor) else value


class Later:
    """A copy of a number, as it is at this point of the device's stream."""

    def __init__(self, value: Number) -> None:
        """Copy it without waiting for the device: the script may write over its own."""
        self.ready = True
        self._read: Callable[[], float | None]
        if value is None or not isinstance(value, torch.Tensor) or value.device.type == "cpu":
            number = None if value is None else float(value)
            self._read = lambda: number
            return
        self.ready = False
        value = value.detach()
        if value.device.type != "cuda":
            copy = value.clone()
            self._read = lambda: float(copy)
            return
        pinned = torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
        pinned.copy_(value, non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(value.device))

        def read() -> float:
            event.synchronize()
            return float(pinned)

        self._read = read

    def read(self) -> float | None:
        """Return the number, waiting for the device where it has not come so far."""
        return self._read()
