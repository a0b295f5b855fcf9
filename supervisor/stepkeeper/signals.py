"""Signals reach a loop at once, also in the moment in which it goes to sleep.

Python runs a handler on the main thread, when that runs next.  A signal that comes between its last look and its wait
would be seen only when the wait is over: so the bytes that Python writes for each signal are read by a thread.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Collection


def listen(
    numbers: Collection[signal.Signals],
    on_signal: Callable[[signal.Signals], None],
    run_thread: Callable[[str, Callable[[], object]], object],
) -> None:
    """Call `on_signal` for each of these signals, on a thread.  Once a process, on the main thread.

    Args:
        numbers: which.
        on_signal: what to do.
        run_thread: starts a thread with a name; what that raises must reach the loop.
    """
    reader, writer = os.pipe2(os.O_CLOEXEC)
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    for number in numbers:
        signal.signal(number, lambda *_: None)  # without a handler Python writes no byte

    def read() -> None:
        while found := os.read(reader, 64):
            for number in found:
                if number in numbers:
                    on_signal(signal.Signals(number))

    run_thread("signals", read)
