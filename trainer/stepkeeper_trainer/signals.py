"""SIGTERM and SIGUSR1 set a flag, and nothing else: what they mean is decided at a step boundary."""

from __future__ import annotations

import signal
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from types import FrameType

CAUGHT = (signal.SIGTERM, signal.SIGUSR1)


class SignalFlag:
    """Remembers the first of Slurm's signals; a handler of the script's own is still called."""

    def __init__(self) -> None:
        """Install the handlers, where this is the main thread (Python allows it nowhere else)."""
        self.heard: signal.Signals | None = None
        self._before: dict[int, Any] = {}
        if threading.current_thread() is threading.main_thread():
            for number in CAUGHT:
                self._before[number] = signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.heard is None:
            self.heard = signal.Signals(number)
        before = self._before.get(number)
        if callable(before):
            before(number, frame)
