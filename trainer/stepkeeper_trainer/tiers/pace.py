"""A limit on bytes per second, shared by all that copy at once."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

BURST_S = 1.0  # of idle time that may be made up for
LIFTED_WITHIN_S = 0.2  # whoever waits goes on so soon after the limit is lifted


class Pace:
    """Lets bytes pass at a rate; None lets them pass at once."""

    def __init__(
        self,
        bytes_per_s: float | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Take clock and sleep as they are, or a test's."""
        assert bytes_per_s is None or bytes_per_s > 0, "a rate is more than 0"
        self._rate, self._clock, self._sleep = bytes_per_s, clock, sleep
        self._lock = threading.Lock()
        self._free_at = clock()  # when all bytes so far have had their time
        self.waited_s = 0.0  # by all together

    def lift(self) -> None:
        """Let bytes pass at once from now on: somebody waits for them."""
        self._rate = None

    def take(self, count: int) -> None:
        """Wait until `count` bytes may pass."""
        with self._lock:
            if self._rate is None:
                return
            now = self._clock()
            free_at = self._free_at = max(self._free_at, now - BURST_S) + count / self._rate
            self.waited_s += max(0.0, free_at - now)
        while self._rate is not None and (left_s := free_at - self._clock()) > 0:
            self._sleep(min(left_s, LIFTED_WITHIN_S))
