"""What stands in the place of a run before a job is submitted for it: told now, and not when the job starts."""

from __future__ import annotations

import os
from pathlib import Path

from stepkeeper.core.events import JobState
from stepkeeper.core.exits import ExitCode
from stepkeeper.errors import StepkeeperError
from stepkeeper.selftest.jobs import Slurm
from stepkeeper.slurm.client import SlurmError
from stepkeeper.store import rundir
from stepkeeper_trainer.formats import lease, records


def require_open(directory: Path) -> None:
    """Refuse a run directory that the job would refuse, or find finished, and then do nothing.

    Raises:
        OSError: it cannot be looked at.
        StepkeeperError: it is not ours, others may write it, or its run is over for good.
    """
    if not os.path.lexists(directory):
        return
    rundir.require_ours(directory)
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
            f"job {held.job_id} waits in the queue to go on with this run, and only one of the two will: "
            f"scancel {held.job_id}, if the new one shall"
        )
    if state is JobState.ENDED:
        return ""
    return (
        f"job {held.job_id} works on this run: a job that starts before its end is refused (exit code "
        f"{ExitCode.RUN_BUSY.value}); `stepkeeper stop {directory}` saves and ends it"
    )
