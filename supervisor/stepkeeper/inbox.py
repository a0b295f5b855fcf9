"""The one queue between threads and a loop, and the threads that put something there."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from stepkeeper.sources.clock import Clock

Item = TypeVar("Item")


class SourceError(Exception):
    """A thread of ours failed: a mistake of ours, raised again in the loop."""


class Inbox(Generic[Item]):
    """Items on their way to the loop."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self._queue: queue.SimpleQueue[Item | BaseException] = queue.SimpleQueue()

    def put(self, item: Item) -> None:
        """Hand over one item."""
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
