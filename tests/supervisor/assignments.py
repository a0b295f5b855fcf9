"""What a watcher is told of its job."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from stepkeeper.watcher.messages import Assignment


def assigned(run_directory: Path, **changes: Any) -> Assignment:
    """Return one of a job on node `n1`, with what a test wants otherwise."""
    usual = Assignment(
        run_directory=str(run_directory),
        run_id="r",
        job_id=7,
        slurm_name="7",
        restart_count=0,
        attempt=0,
        nodes=("n1",),
        kill_wait_s=30.0,
        nonce="n",
    )
    return msgspec.structs.replace(usual, **changes)
