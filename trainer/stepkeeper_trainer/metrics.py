"""`metrics.csv`: one line a step, written by rank 0.

Losses are printed so that they read back exactly.  A later row of the same step supersedes the earlier.
A disk that is full costs training nothing: rows wait until it has room again.
"""

from __future__ import annotations

import os
import time
from collections import deque
from typing import TYPE_CHECKING

from stepkeeper_trainer.errors import RunDirectoryError
from stepkeeper_trainer.formats.durable import write_all
from stepkeeper_trainer.log import warn

if TYPE_CHECKING:
    from pathlib import Path

    import torch

METRICS_NAME = "metrics.csv"
HEADER = "step,loss,tokens,lr,grad_norm,time,attempt,launch"
ROWS_WAITING_MAX = 10_000


class Metrics:
    """Appends rows; each is in the kernel's hands when `row` returns, and durable after `sync`."""

    def __init__(self, run_directory: Path, attempt: int, launch: int) -> None:
        """Open the file; a torn last line of a killed writer is closed.

        Raises:
            RunDirectoryError: it cannot be opened.
        """
        self._tail = f"{attempt},{launch}\n"
        self._waiting: deque[str] = deque(maxlen=ROWS_WAITING_MAX)
        self._torn = False
        path = run_directory / METRICS_NAME
        try:
            self._descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
            size = os.fstat(self._descriptor).st_size
            if size == 0:
                self._waiting.append(f"{HEADER}\n")
            else:
                self._torn = os.pread(self._descriptor, 1, size - 1) != b"\n"
        except OSError as error:
            raise RunDirectoryError(f"{path}: cannot be opened: {error.strerror}; mend it") from error
        self._write()

    def row(
        self,
        step: int,
        loss: float | None,
        tokens: int,
        lr: float | torch.Tensor | None,
        grad_norm: float | torch.Tensor | None,
    ) -> None:
        """Append the row of a step."""
        values = (_text(loss), str(tokens), _text(lr), _text(grad_norm), f"{time.time():.3f}")
        self._waiting.append(f"{step},{','.join(values)},{self._tail}")
        self._write()

    def sync(self) -> None:
        """Make all rows durable: a step that is committed has its rows."""
        try:
            os.fsync(self._descriptor)
        except OSError as error:
            warn("metrics_unsynced", why=error.strerror)

    def _write(self) -> None:
        if not self._waiting and not self._torn:
            return
        data = ("\n" if self._torn else "") + "".join(self._waiting)
        try:
            write_all(self._descriptor, data.encode())
        except OSError as error:
            if not self._torn:
                warn("metrics_unwritten", why=error.strerror)
            self._torn = True  # perhaps in the middle of a row: that line is closed before it is said again
            return
        self._torn = False
        self._waiting.clear()


def _text(value: float | torch.Tensor | None) -> str:
    return "" if value is None else repr(float(value))
