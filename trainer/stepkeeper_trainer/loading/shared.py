"""What all threads of a load share: where they read, how much memory is left, and whether one has failed."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from stepkeeper_trainer.loading.layouts import Layouts

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from stepkeeper_trainer.formats.manifest import Manifest


class Budget:
    """Memory that tasks share.  A task that needs more than there is runs when no other does."""

    def __init__(self, limit: int) -> None:
        self._limit, self._used = limit, 0
        self._changed = threading.Condition()

    def take(self, count: int, give_up: Callable[[], bool]) -> None:
        """Wait until there is so much left, or `give_up` says that nobody needs it."""
        with self._changed:
            while self._used and self._used + count > self._limit and not give_up():
                self._changed.wait(0.1)
            self._used += count

    def give(self, count: int) -> None:
        """Give it back."""
        with self._changed:
            self._used -= count
            self._changed.notify_all()


class Load:
    """One load."""

    def __init__(self, directory: Path, manifest: Manifest, memory_bytes: int) -> None:
        self.directory, self.manifest = directory, manifest
        self.budget, self.layouts = Budget(memory_bytes), Layouts(directory)
        self.error: BaseException | None = None  # what the first thread to fail raised
        self.bytes_read = 0
        self._lock = threading.Lock()

    def failed(self) -> bool:
        """Whether no more is to be read."""
        return self.error is not None

    def fail(self, error: BaseException) -> None:
        """Have all threads stop; the first error is the one that is raised."""
        with self._lock:
            self.error = self.error or error

    def count(self, size: int) -> None:
        """Take note of bytes that were read."""
        with self._lock:
            self.bytes_read += size
