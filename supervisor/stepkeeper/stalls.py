"""Noticing that this process did not run for a while: suspended by Slurm, stopped by a signal, or frozen.

Whoever waits for others by the clock asks here first: what could not be heard meanwhile was not late.
"""

from __future__ import annotations

LATE_S = 5.0  # a loop that does nothing slow comes late by less, also on a busy node


class Stalls:
    """Watches one loop.  Seconds are those of a monotonic clock, which goes on while a process is suspended."""

    def __init__(self, now: float) -> None:
        """Begin now."""
        self._seen = now
        self._allowed = 0.0

    def waits(self, seconds: float) -> None:
        """Expect the next look so many seconds later: the loop is about to wait."""
        self._allowed = max(0.0, seconds)

    def look(self, now: float) -> float:
        """Return for how long the loop has not run; 0.0 where it came in time."""
        away = now - self._seen
        late = away - self._allowed
        self._seen, self._allowed = now, 0.0
        return away if late > LATE_S else 0.0
