"""The one queue between the sources and the loop."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from stepkeeper.core.events import Event
from stepkeeper.sources.clock import Clock


class SourceError(Exception):
    """A thread of ours failed: a mistake of ours, raised again in the loop."""


class Inbox:
    """Events on their way to the loop, and the threads that put them there."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self._queue: queue.SimpleQueue[Event | BaseException] = queue.SimpleQueue()

    def put(self, event: Event) -> None:
        """Hand over one event."""
        self._queue.put(event)

    def get(self, within_s: float) -> Event | None:
        """Return the next event, or None when none came in time.

        Raises:
            SourceError: a thread that was started here failed.
        """
        try:
            item = self._queue.get(timeout=max(0.0, within_s))
        except queue.Empty:
            return None
        if isinstance(item, BaseException):
            raise SourceError(f"a source failed: {item!r}") from item
        return item

    def run_thread(self, name: str, work: Callable[[], object]) -> threading.Thread:
        """Run `work` on a thread; whatever it raises reaches the loop with its own traceback."""

        def guarded() -> None:
            try:
                work()
            except BaseException as error:  # noqa: BLE001 - handed to the loop, which raises it
                self._queue.put(error)

        thread = threading.Thread(target=guarded, name=name, daemon=True)
        thread.start()
        return thread
