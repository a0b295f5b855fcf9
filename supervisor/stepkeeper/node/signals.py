"""SIGTERM and SIGINT end the agent in order."""

from __future__ import annotations

import signal

from stepkeeper import signals
from stepkeeper.node.inbox import Inbox, Stop

STOPPING = (signal.SIGTERM, signal.SIGINT)


def listen(inbox: Inbox) -> None:
    """Put a `Stop` into the inbox for each such signal.  Once a process, on the main thread."""
    signals.listen(STOPPING, lambda number: inbox.put(Stop(why=number.name)), inbox.run_thread)
