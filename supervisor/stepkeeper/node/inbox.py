"""The one queue between the agent's threads and its loop."""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec

from stepkeeper import inbox
from stepkeeper.node.core.events import Event
from stepkeeper.node.sensors.readings import Reading

WAITING_MAX = 5000
"""So many readings may wait; then their sensor waits, and the kernel's ring buffer keeps the rest."""
PATIENCE_S = 0.05


class Stop(msgspec.Struct, frozen=True):
    """The agent shall end."""

    why: str


class Do(msgspec.Struct, frozen=True):
    """Something that must happen on the loop's own thread."""

    what: Callable[[], None]


Item = Event | Reading | Stop | Do


class Inbox(inbox.Inbox[Item]):
    """Events, readings and words on their way to the loop."""

    def put_patiently(self, item: Item) -> None:
        """Hand over one item of a source that may flood us: wait while the loop is behind."""
        while self._queue.qsize() > WAITING_MAX:
            time.sleep(PATIENCE_S)
        self._queue.put(item)
