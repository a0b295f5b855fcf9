"""A run whose job waits in Slurm's queue and has not worked on it yet: what every command can say of it."""

from __future__ import annotations

import argparse
import os
import time

import msgspec

from stepkeeper.cli import printing
from stepkeeper.cli.printing import duration, instant
from stepkeeper.core.exits import ExitCode
from stepkeeper.errors import StepkeeperError
from stepkeeper.run_analytics import queue
from stepkeeper.run_analytics.queue import Queued, Waiting
from stepkeeper.run_store import find
from stepkeeper.run_store import status as status_file
from stepkeeper.run_store.paths import RunDirectory
from stepkeeper.slurm import requeue
from stepkeeper.slurm.client import SlurmError

ANSWERED_BY_THE_QUEUE = ("status", "events", "explain", "logs")  # the wait is all that there is to show


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
        printing.say(f"to submit it again: stepkeeper resume {run.typed}")
    else:
        printing.say(f"follow: stepkeeper status --follow {run.typed}")
        printing.say(f"to stop: stepkeeper stop {run.typed}, or scancel {waiting.job}")
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
    as_json = getattr(arguments, "json", False)
    try:
        run = find.find(wanted, os.environ)
    except (StepkeeperError, OSError):
        return _of_slurm(wanted, as_json=as_json) if find.is_job(wanted) else None
    try:
        if status_file.read(run.status) is not None:
            return None
        waiting = queue.waiting(run, None)
    except (OSError, msgspec.MsgspecError):
        return None  # the command's own words say more
    return show(run, waiting, queue.query(waiting.job), as_json=as_json) if waiting is not None else None


def _of_slurm(job: str, *, as_json: bool) -> int | None:
    """Print what Slurm says of a job that waits, and that sbatch itself has submitted; None where it knows none."""
    queued = queue.query(job)
    if not queue.is_pending(queued):
        return None
    if as_json:
        document = {"run_directory": None, "phase": "pending", "done": False, "queue": msgspec.to_builtins(queued)}
        printing.say_json(document, indent=2)
        return ExitCode.FINISHED
    try:
        log = requeue.log_of(job)
    except SlurmError:
        log = ""
    rows = [
        ("phase", "pending"),
        ("Slurm says", queue.words(queued, time.time())),
        ("run", "not known yet: `stepkeeper run` makes its directory when the job starts"),
        ("log", log or "not known"),
    ]
    printing.say_table(rows)
    return ExitCode.FINISHED
