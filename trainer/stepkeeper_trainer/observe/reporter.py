"""What a rank says of its progress: rank 0 each step, the others at most once a second."""

from __future__ import annotations

import math
import os
import time
from typing import TYPE_CHECKING

from stepkeeper_trainer import __version__
from stepkeeper_trainer.formats.messages import Hello, Progress

if TYPE_CHECKING:
    from stepkeeper_trainer.link import Link
    from stepkeeper_trainer.observe.straggler_probe import StragglerProbe


PROGRESS_EVERY_S = 1.0


class Reporter:
    """Turns steps into messages."""

    def __init__(
        self, link: Link, rank: int, world_size: int, straggler_probe: StragglerProbe, *, total_steps: int | None = None
    ) -> None:
        """Introduce this rank."""
        self._link, self._rank, self._world_size, self._straggler_probe = link, rank, world_size, straggler_probe
        self._total_steps = total_steps
        self._said_at = self._stepped_at = time.monotonic()
        self.resumed(None)

    def resumed(self, step: int | None) -> None:
        """Say where training goes on; the first step counts from here."""
        self._stepped_at = time.monotonic()
        self._straggler_probe.restart()
        self._link.greet(
            Hello(
                rank=self._rank,
                world_size=self._world_size,
                pid=os.getpid(),
                version=__version__,
                resumed_step=step,
                total_steps=self._total_steps,
            )
        )

    def step(self, step: int, tokens: int, loss: float | None) -> None:
        """Say that a step was completed."""
        now = time.monotonic()
        step_seconds, self._stepped_at = now - self._stepped_at, now
        self._straggler_probe.step(now)
        if self._rank == 0 or now - self._said_at >= PROGRESS_EVERY_S:
            self._say(step, tokens, loss, step_seconds)

    def alive(self, step: int, tokens: int, loss: float | None) -> None:
        """Say that the rank is alive between steps."""
        self._straggler_probe.disturb()
        if time.monotonic() - self._said_at >= PROGRESS_EVERY_S:
            self._say(step, tokens, loss, None)

    def _say(self, step: int, tokens: int, loss: float | None, step_seconds: float | None) -> None:
        self._said_at = time.monotonic()
        rounded = None if step_seconds is None else round(step_seconds, 6)
        not_finite = loss is not None and not math.isfinite(loss)
        own = self._straggler_probe.take()
        self._link.send(
            Progress(
                rank=self._rank,
                step=step,
                tokens=tokens,
                loss=None if not_finite else loss,
                step_seconds=rounded,
                not_finite=not_finite,
                own_seconds=None if own is None else round(own.seconds, 6),
                loading_seconds=None if own is None else round(own.loading, 6),
            )
        )
