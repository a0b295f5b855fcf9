"""What a simulated training has done, and what of it would outlive a failure."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

DURABLE_KEPT = 10


class Done(NamedTuple):
    """An amount of training."""

    steps_s: float = 0.0  # seconds that a launch with all nodes needs for it; its step takes one
    clock_s: float = 0.0  # that went by


class Progress:
    """Of one run, over all its launches."""

    def __init__(self) -> None:
        """Nothing is done."""
        self.done = Done()
        self._since: float | None = None  # the clock, while it steps
        self._speed = 1.0  # of the launch; 1 with all nodes
        self._snapshots: deque[Done] = deque()  # of the saves in flight, oldest first
        self._durable = [Done()]

    @property
    def stepping(self) -> bool:
        """Whether training goes on."""
        return self._since is not None

    @property
    def saving(self) -> bool:
        """Whether a save is in flight."""
        return bool(self._snapshots)

    @property
    def newest(self) -> int:
        """The step of the newest step directory; 0 where there is none."""
        return int(self._durable[-1].steps_s)

    def go_on(self, now: float, speed: float) -> None:
        """Step from now on."""
        self._since, self._speed = now, speed

    def pause(self, now: float) -> None:
        """Step no longer; takes in what was done up to now."""
        if self._since is not None:
            seconds = now - self._since
            self.done = Done(self.done.steps_s + self._speed * seconds, self.done.clock_s + seconds)
            self._since = None

    def note(self, now: float) -> None:
        """Take in what was done up to now, and go on."""
        if self._since is not None:
            self.pause(now)
            self._since = now

    def snapshot(self) -> int:
        """Begin a save of what is done; return its step."""
        self._snapshots.append(self.done)
        return int(self.done.steps_s)

    def commit(self) -> int | None:
        """Make the oldest save in flight durable; return its step, None where none is in flight any more."""
        if not self._snapshots:
            return None
        done = self._snapshots.popleft()
        self._durable = [*self._durable[1 - DURABLE_KEPT :], done]
        return int(done.steps_s)

    def lose(self) -> float:
        """Go back to the newest step directory; return the seconds of the clock that are lost by it."""
        self._snapshots.clear()
        lost = self.done.clock_s - self._durable[-1].clock_s
        self.done = self._durable[-1]
        return lost

    def roll_back(self) -> float:
        """Go back one step directory, where there is one; return the seconds of the clock that are lost by it."""
        if len(self._durable) > 1:
            self._durable.pop()
        return self.lose()
