"""A run whose job waits in Slurm's queue and has not worked on it yet: what every command can say of it."""

from __future__ import annotations

import argparse
import os
import time

import msgspec

from stepkeeper import printing
from stepkeeper.core.exits import ExitCode
from stepkeeper.errors import StepkeeperError
from stepkeeper.printing import duration, instant
from stepkeeper.seeing import queue
from stepkeeper.seeing.queue import Queued, Waiting
from stepkeeper.store import find
from stepkeeper.store import status as status_file
from stepkeeper.store.rundir import RunDirectory

ANSWERED_BY_THE_QUEUE = ("events", "explain", "logs")  # commands for which the wait is all that there is to tell


def show(run: RunDirectory, waiting: Waiting, queued: Queued | None, *, as_json: bool) -> int:
    """Print where a run stands that no supervisor has worked on yet."""
    now = time.time()
    if as_json:
        document = {
            "run_directory": str(run.path),
            "phase": "pending",
            "done": False,
            "waiting": msgspec.to_builtins(waiting),
            "queue": msgspec.to_builtins(queued),
        }
        printing.say_json(document, indent=2)
        return ExitCode.FINISHED
    over = queued is not None and queue.is_over(queued)
    rows = [
        ("run", str(run.path)),
        ("phase", f"{'gone before it started' if over else 'pending'}, {since(waiting, now)}"),
        ("Slurm says", queue.words(queued, now) if queued is not None else "nothing"),
        ("job", f"{waiting.job}; no supervisor has worked on this run yet"),
        ("logs", f"{run.path / 'logs'} (ranks, once they start)" + (f"; {waiting.log}" if waiting.log else "")),
    ]
    printing.say_table(rows)
    printing.say()
    if over:
        printing.say(f"to submit it again: stepkeeper resume {run.path}")
    else:
        printing.say(f"follow: stepkeeper status --follow {run.path}")
        printing.say(f"to stop: stepkeeper stop {run.path}, or scancel {waiting.job}")
    return ExitCode.FINISHED


def since(waiting: Waiting, now: float) -> str:
    """Say for how long a job has been waited for."""
    return f"for {duration(max(0.0, now - waiting.since))} ({waiting.how.value} {instant(waiting.since)})"


def answers(arguments: argparse.Namespace) -> int | None:
    """Answer a command that found nothing, because the run's job still waits; None where that is not why.

    Returns:
        the exit code.
    """
    wanted = getattr(arguments, "run", None)
    if not isinstance(wanted, str) or arguments.command not in ANSWERED_BY_THE_QUEUE:
        return None
    try:
        run = find.find(wanted, os.environ)
        if status_file.read(run.status) is not None:
            return None
        waiting = queue.waiting(run, None)
    except (StepkeeperError, OSError, msgspec.MsgspecError):
        return None  # the command's own words tell more
    if waiting is None:
        return None
    return show(run, waiting, queue.ask(waiting.job), as_json=getattr(arguments, "json", False))
