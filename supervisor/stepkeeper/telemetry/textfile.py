"""The metrics as a file that is replaced atomically, for node_exporter's textfile collector; never fatal."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from stepkeeper_trainer.formats.durable import write_atomically

EVERY_S = 15.0


class TextFile:
    """Writes the metrics for node_exporter's textfile collector, on a thread of its own."""

    def __init__(
        self, directory: Path, name: str, render: Callable[[], str], *, on_error: Callable[[OSError], None]
    ) -> None:
        self._path = directory / f"{name}.prom"
        self._render = render
        self._on_error = on_error
        self._closing = threading.Event()
        self._keep = self._failing = False
        self._thread = threading.Thread(target=self._write, name="metrics-file", daemon=True)
        self._thread.start()

    def close(self, within_s: float, *, keep: bool) -> None:
        """Write a last time, or remove the file: this node would tell the old figures for ever.

        Args:
            within_s: how long to wait for a directory that hangs.
            keep: the run needs a person, and the alert for that is made from this file.
        """
        self._keep = keep
        self._closing.set()
        self._thread.join(within_s)

    def _write(self) -> None:
        while not self._closing.is_set():
            self._replace()
            self._closing.wait(EVERY_S)
        if self._keep:
            self._replace()
            return
        try:
            self._path.unlink(missing_ok=True)
        except OSError as error:
            self._on_error(error)

    def _replace(self) -> None:
        try:
            write_atomically(self._path, self._render().encode(), mode=0o644)
            self._failing = False
        except OSError as error:
            if not self._failing:  # once, not every few seconds
                self._on_error(error)
            self._failing = True
