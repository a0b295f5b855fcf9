"""`metrics.csv`: one line a step, written by rank 0.

Losses are printed so that they read back exactly.  A later row of the same step supersedes the earlier.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from stepkeeper_trainer.formats.durable import write_all

if TYPE_CHECKING:
    from pathlib import Path

METRICS_NAME = "metrics.csv"
HEADER = "step,loss,tokens,lr,grad_norm,time,attempt,launch"


class Metrics:
    """Appends rows; each is in the kernel's hands when `row` returns, and durable after `sync`."""

    def __init__(self, run_directory: Path, attempt: int, launch: int) -> None:
        """Open the file; a torn last line of a killed writer is closed.  Raises OSError."""
        self._tail = f"{attempt},{launch}\n"
        path = run_directory / METRICS_NAME
        self._descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        size = os.fstat(self._descriptor).st_size
        if size == 0:
            write_all(self._descriptor, f"{HEADER}\n".encode())
        elif os.pread(self._descriptor, 1, size - 1) != b"\n":
            write_all(self._descriptor, b"\n")

    def row(
        self, step: int, loss: float | None, tokens: int, lr: float | None, grad_norm: float | None
    ) -> None:
        """Append the row of a step.  Raises OSError."""
        values = (_text(loss), str(tokens), _text(lr), _text(grad_norm), f"{time.time():.3f}")
        write_all(self._descriptor, f"{step},{','.join(values)},{self._tail}".encode())

    def sync(self) -> None:
        """Make all rows durable: a step that is committed has its rows.  Raises OSError."""
        os.fsync(self._descriptor)


def _text(value: float | None) -> str:
    return "" if value is None else repr(float(value))
