"""A thread of the library that does one job after the other: saves, and what the main thread has no time for."""

from __future__ import annotations

import atexit
import threading
from queue import SimpleQueue
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

LEAVE_WITHIN_S = 5.0


class Worker:
    """Begins with its first job.

    A script may end while it works (an exception, no `finish`).  Python ends threads then in the middle of what they
    do, and one that is in torch's code takes the process down with SIGABRT, whatever its exit code was to be.  So the
    end of the process waits a little for the job at hand.
    """

    def __init__(self, name: str) -> None:
        """Prepare; `name` is the thread's."""
        self._name = name
        self._jobs: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._at_work = threading.Lock()
        self.leaving = False  # the process ends: a job that only waits is to end, too
        self.has_left = False  # none is at work then, and none begins any more
        self._thread: threading.Thread | None = None

    def do(self, job: Callable[[], None]) -> None:
        """Have a job done."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
            atexit.register(self._rest)
        self._jobs.put(job)

    def wait(self, within_s: float) -> bool:
        """Wait until the jobs so far are done; false if that is late, or the process ends and none begins any more."""
        if self._thread is None or self.leaving:
            return self._thread is None
        done = threading.Event()
        self.do(done.set)
        return done.wait(within_s)

    def _run(self) -> None:
        while True:
            job = self._jobs.get()
            with self._at_work:
                if self.leaving:
                    return
                job()

    def _rest(self) -> None:
        """Let the job at hand end, up to a limit, and no other begin."""
        self.leaving = True
        self.has_left = self._at_work.acquire(timeout=LEAVE_WITHIN_S)
