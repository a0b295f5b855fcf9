"""Data that is left out: a loss went wrong on it, training went back, and the run does not take it again.

The supervisor says which steps' data; the sampler moves on past it right before the first of them, on all ranks alike,
and keeps that in its state, so that a resume from behind does not leave out twice.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

from stepkeeper_trainer.log import say, warn

if TYPE_CHECKING:
    from stepkeeper_trainer.formats.lineage import LeftOut


@runtime_checkable
class Skips(Protocol):
    """A sampler that can leave out data, as `GlobalSampler` does."""

    def skip(self, step: int, steps: int) -> int:
        """Move past the data of `steps` steps from `step` on; return the samples, 0 where that is not known yet."""
        ...

    def skipped_at(self, step: int) -> int:
        """Return how often data was left out at a step."""
        ...


@runtime_checkable
class Expects(Protocol):
    """A sampler that is read ahead of training, and has to know beforehand."""

    def expect(self, windows: tuple[LeftOut, ...], done: int) -> None:
        """Take in what will be left out from `done` completed steps on."""
        ...


class Skipping:
    """Of one rank."""

    def __init__(self, sampler: object, windows: tuple[LeftOut, ...], done: int, *, quiet: bool = False) -> None:
        """Prepare at `done` completed steps; what begins at or before them is in the state already.

        Args:
            sampler: of the state, or a copy of it that is read ahead.
            windows: whose data is left out.
            done: completed steps.
            quiet: log nothing.
        """
        self._windows = [window for window in windows if window.step > done]
        self._sampler = sampler if isinstance(sampler, Skips) else None
        self._quiet = quiet
        if self._windows and self._sampler is None:
            warn("data_not_skipped", why="the sampler has no `skip`: give the CheckpointManager a GlobalSampler")
        if isinstance(sampler, Expects):
            sampler.expect(tuple(self._windows), done)
        self.at(done)

    def at(self, done: int) -> None:
        """Leave out what is due when so many steps are completed."""
        if not self._windows or self._sampler is None:
            return
        for window in [each for each in self._windows if each.step <= done + 1]:
            same = [each for each in self._windows if each.step == window.step]
            if self._sampler.skipped_at(window.step) >= len(same):
                self._windows = [each for each in self._windows if each.step != window.step]
                continue
            samples = self._sampler.skip(window.step, window.steps)
            if not samples:
                return  # how many a step takes is known after the first one
            if not self._quiet:
                say("data_skipped", step=window.step, steps=window.steps, samples=samples)
