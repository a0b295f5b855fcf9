"""What every way's training tells the benchmark, and how a rank is made to stand still.  Standard library only."""

import os
import time
from pathlib import Path

DIRECTORY = Path(os.environ["RECOVERY_DIR"])
HANGS = 1  # the rank that stands still when it is told to


def began(rank: int) -> None:
    """Say which process is a rank."""
    (DIRECTORY / f"rank-{rank}.pid").write_text(str(os.getpid()))


def stepped(rank: int, step: int) -> None:
    """Say that a step is done: rank 0 writes it down; another stands still, once, where it is told to."""
    if rank == 0:
        with (DIRECTORY / "progress").open("a") as file:
            file.write(f"{step} {time.time()} {os.getpid()}\n")
    wanted = DIRECTORY / "hang"
    if rank == HANGS and wanted.exists():
        wanted.unlink()
        (DIRECTORY / "hung").write_text(str(time.time()))
        while True:
            time.sleep(1)
