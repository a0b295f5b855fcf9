"""Signals to the batch process become events."""

from __future__ import annotations

import signal

from stepkeeper import signals
from stepkeeper.core.events import SignalReceived
from stepkeeper.sources.inbox import Inbox

NOTICED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)


def listen(inbox: Inbox) -> None:
    """Begin.  Only the main thread may."""

    def take(number: signal.Signals) -> None:
        inbox.put(SignalReceived(at=inbox.clock.now(), signal=number.name.removeprefix("SIG")))

    signals.listen(NOTICED, take, inbox.run_thread)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # a lost terminal is no reason to end a training
