"""When the supervisor is gone: requeue the job, unless it was cancelled, finished or requeued already.

`kill -9` of the batch process would otherwise end the run as FAILED, and with `--no-kill` a job whose
batch node is lost would stay RUNNING with nobody in charge.  Reads the job, the journal and the lease
anew: another watcher may have been faster.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from stepkeeper.core.events import JobFacts, JobState
from stepkeeper.slurm.client import SlurmClient, SlurmError
from stepkeeper.slurm.commands import SlurmCommands
from stepkeeper.store import journal
from stepkeeper.watcher.assignment import Assignment
from stepkeeper_trainer.formats import lease, outcome

CALL_WITHIN_S = 5.0
AGAIN_IN_S = 3.0
CANCELLED_REASONS = ("None", "TimeLimit", "")


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """What came of a rescue."""

    done: bool  # nothing more to do
    why: str
    leave: bool = True
    again_in_s: float = AGAIN_IN_S


def rescue(assignment: Assignment, client: SlurmClient | None = None) -> Result:
    """Requeue the job if that is right.  Never raises for what the world does: the result says it."""
    client = client or SlurmCommands(call_within_s=CALL_WITHIN_S)
    run_directory = Path(assignment.run_directory)
    try:
        settled = _settled(run_directory, assignment)
        job = client.job(assignment.job_id)
        if job.restarts > assignment.restart_count or job.state is JobState.PENDING:
            return Result(done=True, why="requeued already")
        if settled:
            if job.state is JobState.RUNNING:  # the batch node is lost, and nobody else would end it
                client.cancel(assignment.job_id)
            return Result(done=True, why=settled)
        if was_cancelled(job):
            return Result(done=True, why=f"the job was ended from outside ({job.slurm_state} {job.reason})")
        client.requeue(assignment.job_id)
    except (OSError, msgspec.MsgspecError, lease.LeaseError, SlurmError) as error:
        return Result(done=False, why=str(error))
    return Result(done=True, why=f"requeued job {assignment.job_id}: its supervisor is gone")


def was_cancelled(job: JobFacts) -> bool:
    """Tell a cancelled job from one whose batch process died: only the reason tells them apart."""
    return job.state in (JobState.COMPLETING, JobState.ENDED) and job.reason in CANCELLED_REASONS


def _settled(run_directory: Path, assignment: Assignment) -> str:
    """Return why nothing is to be rescued; empty if something is."""
    held = lease.read(run_directory)
    if held is not None and held.epoch > (assignment.job_id, assignment.restart_count):
        return f"job {held.job_id} (restart {held.restart_count}) goes on with this run"
    said = outcome.read(run_directory)
    if said is not None and said.outcome == "finished":
        return f"the training finished at step {said.step}"
    carried = journal.reconstruct(run_directory / "journal.jsonl")
    if carried.attempt > assignment.attempt and "ended:" in carried.previous:
        return carried.previous
    return ""
