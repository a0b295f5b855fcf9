"""Checks the run directory before a job is submitted: what is wrong is reported now, not when the job starts."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from stepkeeper.core.events import JobState
from stepkeeper.core.exits import ExitCode
from stepkeeper.errors import StepkeeperError, UsageError
from stepkeeper.printing import duration
from stepkeeper.run_store import paths
from stepkeeper.slurm.client import SlurmError
from stepkeeper.submit.sbatch import SLURM_LATE_S
from stepkeeper.submit.selftest import Slurm
from stepkeeper_trainer.formats import lease, records


def require_open(directory: Path) -> None:
    """Refuse a run directory that the job would refuse, or find finished, and then do nothing.

    Raises:
        OSError: it cannot be looked at.
        StepkeeperError: it is not ours, others may write it, or its run is over for good.
    """
    if not os.path.lexists(directory):
        return
    paths.require_ours(directory)
    try:
        said = records.read_outcome(directory)
    except ValueError as error:
        raise StepkeeperError(
            f"{directory / records.OUTCOME_NAME}: cannot be read: {error}", ExitCode.RUN_DIRECTORY
        ) from error
    if said is not None and said.outcome == "finished":
        raise StepkeeperError(
            f"{directory}: this run has finished, at step {said.step}, and a finished one is never run again; to train "
            "on from its end choose a new --run-dir and give the script "
            f"--resume-from {directory}/checkpoints/step_{said.step:08d}",
            ExitCode.RUN_DIRECTORY,
        )


def busy(directory: Path, client: Slurm) -> str:
    """Return in words that another job works on the run, or waits to go on with it; empty where none does.

    Raises:
        SlurmError: Slurm does not answer.
    """
    try:
        held = lease.read(directory)
    except (OSError, lease.LeaseError):
        return ""  # the job that is submitted says what is wrong with it
    if held is None or held.job_id == lease.NO_JOB:
        return ""
    try:
        state = client.job(str(held.job_id)).state
    except SlurmError as error:
        if error.unreachable:
            raise
        return ""  # a job that Slurm has forgotten
    if state is JobState.PENDING:
        return (
            f"job {held.job_id} waits in the queue to continue this run, and only one of the two will: "
            f"scancel {held.job_id}, if the new one shall"
        )
    if state is JobState.ENDED:
        return ""
    return (
        f"job {held.job_id} works on this run: a job that starts before its end is refused (exit code "
        f"{ExitCode.RUN_BUSY.value}); `stepkeeper stop {directory}` saves and ends it"
    )


# The time limit of an attempt, as sbatch reads it, beside the notice that comes before it.  Pure.

_FORM = re.compile(
    r"(?:(?P<days>\d+)-(?P<hours>\d+)(?::(?P<minutes>\d+))?(?::(?P<seconds>\d+))?|(?P<short>\d+(?::\d+){0,2}))"
)
_OPTION = re.compile(r"(?:--time[= ]|-t[ =]?)(?P<value>\S+)")


def limit_seconds(text: str) -> float | None:
    """Return a limit as sbatch reads it; None for no limit, or words that only sbatch can judge.

    >>> [limit_seconds(each) for each in ("90", "1:30", "2:00:00", "1-12", "1-00:30", "UNLIMITED")]
    [5400.0, 90.0, 7200.0, 129600.0, 88200.0, None]
    """
    match = _FORM.fullmatch(text.strip())
    if match is None:
        return None
    if match["short"] is None:
        days, hours, minutes, rest = (int(match[name] or 0) for name in ("days", "hours", "minutes", "seconds"))
        found = ((days * 24 + hours) * 60 + minutes) * 60 + rest
    else:
        parts = [int(part) for part in match["short"].split(":")]
        in_seconds = {1: (60,), 2: (60, 1), 3: (3600, 60, 1)}[len(parts)]
        found = sum(part * each for part, each in zip(parts, in_seconds, strict=True))
    return float(found) or None  # 0 asks for no limit


def requested_limit(time: str | None, options: Sequence[str]) -> str | None:
    """Return the limit that a job asks for: by `-t`, or among the other options of sbatch, whose last one counts."""
    named = [match["value"] for option in options if (match := _OPTION.fullmatch(option))]
    return named[-1] if named else time


def require_room(limit_s: float, notice_s: float, where: str) -> None:
    """Refuse a limit of which nothing is left for training.

    Args:
        limit_s: of one attempt.
        notice_s: before its end the supervisor gets the signal.
        where: that limit comes from, for the error.

    Raises:
        StepkeeperError: each attempt would save and requeue itself as soon as it had started.
    """
    if limit_s <= notice_s + SLURM_LATE_S:
        raise UsageError(
            f"{where}: the time limit of an attempt is {duration(limit_s)}, and {duration(notice_s)} before its end "
            f"(give or take {SLURM_LATE_S} s, Slurm is not exact) it saves and requeues itself: nothing is left for "
            "training; ask for more with -t, or say a shorter --notice-s"
        )
