"""The one queue between the agent's threads and its loop.  Putting is safe in a signal handler."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable

import msgspec

from stepkeeper.node.core.events import Event
from stepkeeper.node.sensors.readings import Reading
from stepkeeper.sources.clock import Clock

WAITING_MAX = 5000
"""So many readings may wait; then their sensor waits, and the kernel's ring buffer keeps the rest."""
PATIENCE_S = 0.05


class Stop(msgspec.Struct, frozen=True):
    """The agent shall end."""

    why: str


class Do(msgspec.Struct, frozen=True):
    """Something that must happen on the loop's own thread."""

    what: Callable[[], None]


class SourceError(Exception):
    """A thread of ours failed: a mistake of ours, raised again in the loop."""


Item = Event | Reading | Stop | Do


class Inbox:
    """Events, readings and words on their way to the loop, and the threads that put them there."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self._queue: queue.SimpleQueue[Item | BaseException] = queue.SimpleQueue()

    def put(self, item: Item) -> None:
        """Hand over one item."""
        self._queue.put(item)

    def put_patiently(self, item: Item) -> None:
        """Hand over one item of a source that may flood us: wait while the loop is behind."""
        while self._queue.qsize() > WAITING_MAX:
            time.sleep(PATIENCE_S)
        self._queue.put(item)

    def fail(self, error: BaseException) -> None:
        """Have the loop raise what went wrong elsewhere."""
        self._queue.put(error)

    def get(self, within_s: float) -> Item | None:
        """Return the next item, or None when none came in time.

        Raises:
            SourceError: a thread failed.
        """
        try:
            item = self._queue.get(timeout=max(0.0, within_s))
        except queue.Empty:
            return None
        if isinstance(item, BaseException):
            raise SourceError(f"a thread failed: {item!r}") from item
        return item

    def run_thread(self, name: str, work: Callable[[], object]) -> threading.Thread:
        """Run `work` on a thread; whatever it raises reaches the loop with its own traceback."""

        def guarded() -> None:
            try:
                work()
            except BaseException as error:  # noqa: BLE001 - handed to the loop, which raises it
                self.fail(error)

        thread = threading.Thread(target=guarded, name=name, daemon=True)
        thread.start()
        return thread
