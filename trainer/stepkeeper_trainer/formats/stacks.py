"""Where a rank's stacks go when the training stands still, and the signal that has Python write them.

`faulthandler` writes them in the signal's own handler, in whatever system call the rank waits: no Python code runs.
"""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

DIRECTORY = "stacks"  # below the logs of a launch
SIGNAL = signal.SIGRTMIN + 9  # of the real-time signals nobody's own: Slurm, CUDA and NCCL use none of them


def file(run_directory: Path, attempt: int, launch: int, rank: int) -> Path:
    """Return the file of a rank."""
    logs = run_directory / "logs" / f"attempt-{attempt:03d}" / f"launch-{launch:03d}"
    return logs / DIRECTORY / f"rank-{rank}.txt"
