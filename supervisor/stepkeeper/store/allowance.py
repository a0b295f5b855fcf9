"""How much of what repeats reaches the journal: a few at once, then one in a while."""

from __future__ import annotations


class RateLimiter:
    """Grants `burst` at once, and one more every `every_s` seconds, never more than `burst` in store."""

    def __init__(self, burst: int, every_s: float) -> None:
        self._burst = burst
        self._every_s = every_s
        self._stored = float(burst)
        self._at: float | None = None

    def take(self, now: float) -> bool:
        """Take one, if there is one.

        >>> allowance = Allowance(burst=2, every_s=10.0)
        >>> [allowance.take(at) for at in (0.0, 0.1, 0.2, 10.3, 10.4)]
        [True, True, False, True, False]
        """
        if self._at is not None:
            self._stored = min(self._burst, self._stored + max(0.0, now - self._at) / self._every_s)
        self._at = now
        if self._stored < 1.0:
            return False
        self._stored -= 1.0
        return True
