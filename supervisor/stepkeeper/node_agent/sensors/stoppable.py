"""A sensor on a thread of its own, which a pipe wakes to stop: it waits for that beside whatever else it waits for."""

from __future__ import annotations

import os
import select
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable


class Stoppable(ABC):
    """Runs `_run` from `start` on, until `_stopped`."""

    def __init__(self, name: str, on_failure: Callable[[BaseException], object]) -> None:
        """Prepare a thread of that name; `on_failure` gets a mistake of ours, with which the thread ends."""
        self._stop_read, self._stop_write = os.pipe2(os.O_CLOEXEC)
        self._on_failure = on_failure
        self._thread = threading.Thread(target=self._guarded, name=name, daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self, within_s: float = 3.0) -> None:
        """End the thread, and what it has started, once; returns in time."""
        os.write(self._stop_write, b"x")
        if self._thread.ident is not None:  # it was started
            self._thread.join(within_s)
        if not self._thread.is_alive():
            os.close(self._stop_read)
            os.close(self._stop_write)

    # --- on the thread ----------------------------------------------------------------------------

    def _guarded(self) -> None:
        try:
            self._run()
        except BaseException as error:  # noqa: BLE001 - handed over: a sensor that has ended must not look healthy
            self._on_failure(error)

    @abstractmethod
    def _run(self) -> None:
        """Sense until asked to stop."""

    def _stopped(self, wait_s: float) -> bool:
        """Wait for so long; return at once, and true, where it is asked to stop."""
        return bool(select.select([self._stop_read], [], [], wait_s)[0])
