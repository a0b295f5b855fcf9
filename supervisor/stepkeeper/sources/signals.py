"""Signals to the batch process become events.  The handler puts one event and returns."""

from __future__ import annotations

import signal
from types import FrameType

from stepkeeper.core.events import SignalReceived
from stepkeeper.sources.inbox import Inbox

NOTICED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)


def listen(inbox: Inbox) -> None:
    """Install the handlers.  Only the main thread may."""

    def handle(number: int, _frame: FrameType | None) -> None:
        name = signal.Signals(number).name.removeprefix("SIG")
        inbox.put(SignalReceived(at=inbox.clock.now(), signal=name))

    for number in NOTICED:
        signal.signal(number, handle)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # a lost terminal is no reason to end a training
