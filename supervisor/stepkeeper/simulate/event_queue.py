"""What will happen in a simulated world, in the order of time."""

from __future__ import annotations

import heapq
import math
from typing import NamedTuple

from stepkeeper.core import events as on


class QueuedEvent(NamedTuple):
    """One thing that happens."""

    at: float
    number: int  # in the order of scheduling
    what: on.Event | str  # an event for `decide`, or the name of what the world does
    launch: int | None  # it is void when another launch runs


class EventQueue:
    """All that is scheduled."""

    def __init__(self) -> None:
        """Nothing is."""
        self._heap: list[QueuedEvent] = []
        self._scheduled = 0

    @property
    def next_at(self) -> float:
        """When the next one comes; infinity where there is none."""
        return self._heap[0].at if self._heap else math.inf

    def add(self, at: float, what: on.Event | str, launch: int | None) -> None:
        """Schedule something; of the same instant, what was scheduled first comes first."""
        self._scheduled += 1
        heapq.heappush(self._heap, QueuedEvent(at, self._scheduled, what, launch))

    def pop(self) -> QueuedEvent:
        """Take the next one."""
        return heapq.heappop(self._heap)

    def clear(self) -> None:
        """Schedule nothing any more."""
        self._heap.clear()
