"""What the start of an attempt and its dry run share: what is left of the attempts before, and what is launched."""

from __future__ import annotations

import os
from pathlib import Path

from stepkeeper.actions.launch import Job
from stepkeeper.config import keeping, tiers
from stepkeeper.config.settings import RunSettings
from stepkeeper.core.exits import ExitCode
from stepkeeper.errors import StepkeeperError
from stepkeeper.slurm import resubmission
from stepkeeper.slurm.allocation import Allocation
from stepkeeper.slurm.argv import Geometry
from stepkeeper.store import journal, rundir, submission
from stepkeeper.submitting import own_script
from stepkeeper_trainer.formats import lease, records


def carried(directory: rundir.RunDirectory) -> journal.Carried:
    """Return what the attempts before left.  Raises `StepkeeperError`."""
    try:
        return journal.reconstruct(directory.journal)
    except OSError as error:
        raise StepkeeperError(
            f"{directory.journal}: cannot be read: {error.strerror}", ExitCode.RUN_DIRECTORY
        ) from error


def continued(environment: dict[str, str]) -> Path | None:
    """Take out of the environment whose run this job goes on with, where it was submitted in place of another.

    It must be that job's run still, or ours already: the variable may have been inherited by any other job.
    """
    number, _, directory = environment.pop(resubmission.CONTINUES, "").partition(":")
    if not number.isdigit() or not os.path.isabs(directory):
        return None
    try:
        held = lease.read(Path(directory))
        submitted = submission.read(Path(directory)) if held is None else None  # no job has worked on it yet
    except (OSError, lease.LeaseError):
        return None  # another place than that is then what the settings say
    ours = environment.get("SLURM_JOB_ID", "")
    whose = str(held.job_id) if held is not None else str(submitted.number) if submitted is not None else ""
    return Path(directory) if whose and whose in (number, ours) else None


def standby_imports(settings: RunSettings) -> tuple[str, ...] | None:
    """Return what warm standbys import besides torch and the trainer library; None where there are to be none."""
    modules = (settings.warm_standby_imports or "").split(",")
    return tuple(module.strip() for module in modules if module.strip()) if settings.warm_standby else None


def finished_step(path: Path) -> int | None:
    """Return the last step of a finished run, else None.  Raises `StepkeeperError`."""
    try:
        said = records.read_outcome(path)
    except (OSError, ValueError) as error:
        raise StepkeeperError(
            f"{path / records.OUTCOME_NAME}: cannot be read: {error}", ExitCode.RUN_DIRECTORY
        ) from error
    return said.step if said is not None and said.outcome == "finished" else None


def job(
    command: tuple[str, ...],
    settings: RunSettings,
    allocation: Allocation,
    directory: rundir.RunDirectory,
    *,
    attempt: int,
    socket: str,
    script: own_script.Found,
) -> Job:
    """Return what is the same for every launch of an attempt."""
    return Job(
        command=command,
        torchrun=settings.torchrun,
        geometry=Geometry(
            tasks_per_node=allocation.tasks_per_node,
            cpus_per_task=allocation.cpus_per_task,
            overcommit=allocation.overcommit,
        ),
        run_directory=directory.path,
        run_id=directory.run_id,
        attempt=attempt,
        socket=socket,
        told={**tiers.variables(settings), **keeping.variables(settings)},
        starts_ranks=bool(script.starts_ranks),
        resume_argument=settings.resume_argument,
        takes_resume=script.takes,
    )
