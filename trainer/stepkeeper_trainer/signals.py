"""SIGTERM and SIGUSR1 set a flag, and nothing else: what they mean is decided at a step boundary."""

from __future__ import annotations

import signal
import threading
import time
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from types import FrameType

CAUGHT = (signal.SIGTERM, signal.SIGUSR1)


class Heard(NamedTuple):
    """One signal that arrived."""

    signal: signal.Signals
    at: float  # of the monotonic clock


class SignalFlag:
    """Remembers the newest of Slurm's signals; a handler of the script's own is still called."""

    def __init__(self) -> None:
        """Install the handlers, where this is the main thread (Python allows it nowhere else)."""
        self.heard: Heard | None = None
        self._before: dict[int, Any] = {}
        if threading.current_thread() is threading.main_thread():
            for number in CAUGHT:
                self._before[number] = signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.heard = Heard(signal.Signals(number), time.monotonic())
        before = self._before.get(number)
        if callable(before):
            before(number, frame)
