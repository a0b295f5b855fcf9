"""Time: Unix seconds that never go backwards, and how the clocks of others stand to them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import msgspec

from stepkeeper.core.events import JobFacts

SET_LEAST_S = 1.5  # a wall clock that goes apart from ours by less is not taken for set; Slurm tells whole seconds


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
        """Return an instant of ours as the wall clock tells it now, which somebody may have set since."""
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
