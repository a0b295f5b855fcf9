"""What rank 0 keeps of each step: a row of metrics and the loss history, complete and exact."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stepkeeper_trainer.later import Later, Number
from stepkeeper_trainer.metrics import Metrics
from stepkeeper_trainer.trackers import Trackers, note_mlflow_run

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from stepkeeper_trainer.environment import Environment
    from stepkeeper_trainer.replay import Replay
    from stepkeeper_trainer.state import Counters
    from stepkeeper_trainer.trackers import Tracker


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
                self.replay.heard(step.step, loss)
        lr, grad_norm = step.lr.read(), step.grad_norm.read()
        self._metrics.row(step.step, loss, step.tokens, lr, grad_norm, at=step.at)
        if self._trackers is not None:
            values = {"loss": loss, "tokens": float(step.tokens), "lr": lr, "grad_norm": grad_norm}
            self._trackers.row(step.step, values | (dict(step.others) if step.others else {}))

    def sync(self, limit_at: float) -> object:
        """Make the rows so far durable, by `limit_at` (Unix seconds)."""
        return self._metrics.sync(limit_at)

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
    """Open `metrics.csv`, and have a tracker hear what is written there.

    Raises:
        RunDirectoryError: the file cannot be opened.
    """
    metrics = Metrics(run_directory, environment.attempt, environment.launch)
    trackers = Trackers(tracker, run_directory) if tracker is not None else None
    return Records(counters, metrics, trackers, run_directory=run_directory)
