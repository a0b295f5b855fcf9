"""Gathers what sensors hand over, from whatever thread."""

import threading
from collections.abc import Callable
from typing import TypeVar

from stepkeeper.node_agent.readings import Reading
from tests.fake_nvml import wait_until

T = TypeVar("T", bound=Reading)


class Collected:
    """A callback for sensors that remembers."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._readings: list[Reading] = []

    def __call__(self, reading: Reading) -> None:
        with self._lock:
            self._readings.append(reading)

    def of(self, kind: type[T]) -> list[T]:
        """Return the readings of one kind, oldest first."""
        with self._lock:
            return [reading for reading in self._readings if isinstance(reading, kind)]

    def __len__(self) -> int:
        with self._lock:
            return len(self._readings)

    def wait_for(self, kind: type[T], condition: Callable[[T], object] = bool, *, within_s: float = 90.0) -> T:
        """Return the first reading of the kind that meets the condition, once there is one."""
        wait_until(
            lambda: any(condition(reading) for reading in self.of(kind)), f"a {kind.__name__} as wanted", within_s
        )
        return next(reading for reading in self.of(kind) if condition(reading))
