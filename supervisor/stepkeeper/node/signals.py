"""SIGTERM and SIGINT reach the loop at once, also in the moment in which it goes to sleep.

Python runs a handler on the main thread, when that runs next.  A signal that comes between its last look and its wait
would be seen only when the wait is over: so the bytes that Python writes for each signal are read by a thread.
"""

from __future__ import annotations

import os
import signal

from stepkeeper.node.inbox import Inbox, Stop

STOPPING = (signal.SIGTERM, signal.SIGINT)


def listen(inbox: Inbox) -> None:
    """Put a `Stop` into the inbox for each such signal.  Once a process, on the main thread."""
    reader, writer = os.pipe2(os.O_CLOEXEC)
    os.set_blocking(writer, False)
    for number in STOPPING:
        signal.signal(number, lambda *_: None)  # without a handler Python writes no byte
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)

    def read() -> None:
        while numbers := os.read(reader, 64):
            for number in numbers:
                if number in STOPPING:
                    inbox.put(Stop(why=signal.Signals(number).name))

    inbox.run_thread("signals", read)
