"""Time: Unix seconds that never go backwards, so that deadlines of Slurm and of our own compare."""

from __future__ import annotations

import time


class Clock:
    """Anchored to the wall clock once; afterwards it only follows the monotonic one."""

    def __init__(self) -> None:
        self._offset = time.time() - time.monotonic()

    def now(self) -> float:
        """Return Unix seconds."""
        return time.monotonic() + self._offset

    def to_wall(self, at: float | None) -> float | None:
        """Return an instant of ours as the wall clock tells it now, which somebody may have set since."""
        return None if at is None else at - self.now() + time.time()
