"""What rank 0 keeps of each step: a row of metrics and the loss history, complete and exact."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stepkeeper_trainer.later import Later, Number

if TYPE_CHECKING:
    from stepkeeper_trainer.metrics import Metrics
    from stepkeeper_trainer.state import Counters


@dataclass(frozen=True, slots=True)
class _Step:
    step: int
    tokens: int
    loss: Later
    lr: Later
    grad_norm: Later
    at: float  # Unix seconds


class Records:
    """Numbers of a device are taken in at the next boundary, or when a save needs them."""

    def __init__(self, counters: Counters, metrics: Metrics) -> None:
        self._counters, self._metrics = counters, metrics
        self._open: _Step | None = None

    def step(self, loss: Number, lr: Number, grad_norm: Number) -> None:
        """Record the step that `counters` is at."""
        self.settle()
        counters = self._counters
        step = _Step(counters.step, counters.tokens, Later(loss), Later(lr), Later(grad_norm), time.time())
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
        self._metrics.row(step.step, loss, step.tokens, step.lr.read(), step.grad_norm.read(), at=step.at)
