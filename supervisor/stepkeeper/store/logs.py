"""The ranks' logs of a run: those of failed launches and of the newest ones are kept."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TextIO

from stepkeeper_trainer.formats import collectives

FAILED_NAME = "failed"
ERRORS_NAME = "errors"  # directory: torch's error files, one a rank
STACKS_NAME = collectives.STACKS_DIRECTORY  # of ranks that stood still
KEPT_MAX = 20
SUPERVISOR_NAME = "supervisor.jsonl"


def open_supervisors(attempt: Path) -> TextIO:
    """Open the supervisor's own lines of an attempt, as JSON: for programs, and where Slurm empties the job's log.

    Args:
        attempt: the directory of its logs.

    Raises:
        OSError: it cannot be written, or is a symbolic link.
    """
    attempt.mkdir(parents=True, exist_ok=True)
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.fdopen(os.open(attempt / SUPERVISOR_NAME, flags, 0o666), "a", encoding="utf-8", errors="replace")


def mark_failed(logs: Path, why: str) -> None:
    """Keep the logs of a launch for good.  Raises OSError."""
    (logs / FAILED_NAME).write_text(why + "\n", encoding="utf-8")


def prune(logs: Path, *, kept_max: int = KEPT_MAX) -> list[Path]:
    """Remove the logs of launches that ended as intended, but for the newest ones; return what was removed.

    Args:
        logs: the `logs/` directory of a run.
        kept_max: launches that are kept whether they failed or not.

    Raises:
        OSError: something could not be listed or removed.
    """
    launches = sorted(logs.glob("attempt-*/launch-*"), key=lambda path: (path.parent.name, path.name))
    removed = []
    for launch in launches[: max(0, len(launches) - kept_max)]:
        if not launch.is_symlink() and not (launch / FAILED_NAME).exists():
            shutil.rmtree(launch)
            removed.append(launch)
            if not any(launch.parent.iterdir()):
                launch.parent.rmdir()
    return removed
