"""When the supervisor is gone: requeue the job, unless it was cancelled, finished or requeued already.

`kill -9` of the batch process would otherwise end the run as FAILED, and with `--no-kill` a job whose batch node is
lost would stay RUNNING with nobody in charge.  Reads the job, the journal and the lease anew: another watcher may have
been faster, or the supervisor may be back (`failover`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from stepkeeper.core.events import JobFacts, JobState
from stepkeeper.core.eviction import preempted_at_last
from stepkeeper.run_store import journal
from stepkeeper.run_store import lease as run_store_lease
from stepkeeper.slurm import requeue
from stepkeeper.slurm.client import SlurmError
from stepkeeper.slurm.jobs import PATIENT_S, SlurmCommands
from stepkeeper.watcher.messages import Assignment
from stepkeeper_trainer.formats import lease, lineage, records
from stepkeeper_trainer.formats.durable import append_line

CALL_WITHIN_S = 5.0
SILENT_S = 1800.0  # without a journal record: nobody is in charge, though the run had left this node
RESCUES_MAX = 3  # without a new commit in between: a supervisor that dies at every start is not to be started for ever


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """What came of a rescue."""

    done: bool  # nothing more to do
    left: bool = False  # the run continues without this node: nothing of it may run here
    unanswered: bool = False  # Slurm did not answer
    why: str


BACK = Result(done=False, why="the supervisor is back")


def rescue(  # noqa: C901, PLR0912 - what is looked at, in its order
    assignment: Assignment,
    node: str,
    *,
    gone: bool,
    asks: bool = True,
    again: bool = False,
    lost: Callable[[], None] = lambda: None,
    cancelled: Callable[[], bool] = lambda: False,
    client: SlurmCommands | None = None,
) -> Result:
    """Requeue the job if that is right.  Never raises for what the world does: the result says it.

    Args:
        assignment: of this watcher.
        node: its name.
        gone: the supervisor counts as gone (`core.liveness`), by its words and by what it writes; else a job that runs
            is left alone.
        asks: whether Slurm is asked; without that only the run directory is read.
        again: an earlier try came to nothing: a controller that is overloaded is given more time to answer.
        lost: called once it is certain that Slurm is about to end the ranks, and that the run is to go on.
        cancelled: whether the supervisor is back meanwhile: then nothing is changed any more.
        client: Slurm's commands by default.
    """
    client = client or SlurmCommands(call_within_s=PATIENT_S if again else CALL_WITHIN_S)
    run_directory = Path(assignment.run_directory)
    try:
        carried = journal.reconstruct(run_directory / "journal.jsonl")
        settled = _settled(run_directory, assignment, carried)
        if not settled and _is_left(carried, assignment, node) and time.time() - carried.at < SILENT_S:
            return Result(done=False, left=True, why="the run continues without this node")
        if not asks:
            return Result(done=False, why="the supervisor may only be slow, or cut off from this node")
        job = client.job(assignment.slurm_name)
        if cancelled():
            return BACK
        ends = job.restarts > assignment.restart_count or job.state is not JobState.RUNNING
        goes_on = not settled and not was_cancelled(job)
        if ends and goes_on:
            lost()
        elif not ends and not gone:
            return Result(done=False, why="the job runs, and its supervisor may only be slow")
        if job.restarts > assignment.restart_count or job.state is JobState.PENDING:
            return Result(done=True, why="requeued already")
        settled = settled or _spent(run_directory)
        if settled:
            if not ends:  # the batch node is lost, and nobody else would end it
                client.cancel(assignment.slurm_name)
            return Result(done=True, why=settled)
        if cancelled():
            return BACK
        if not ends:
            lost()
        if why := _for_good(job, assignment):
            return Result(done=True, why=why)
        return _run_again(client, assignment, node, job, carried)
    except SlurmError as error:
        return Result(done=False, why=str(error), unanswered=error.unreachable)
    except (OSError, ValueError) as error:
        return Result(done=False, why=str(error))


def _for_good(job: JobFacts, assignment: Assignment) -> str:
    """Return why a job is not to run again though the run is not over; empty if it is."""
    if was_cancelled(job):
        return f"the job was ended from outside ({job.slurm_state} {job.reason})"
    if not assignment.batch:
        return "there is no batch script to requeue: run again with the same --run-dir"
    return ""


def _run_again(
    client: SlurmCommands, assignment: Assignment, node: str, job: JobFacts, carried: journal.Carried
) -> Result:
    """Have the job run again, and write that down.  Raises SlurmError, OSError."""
    now = time.time()
    excluded = [exclusion.node for exclusion in carried.excluded if exclusion.until > now]
    besides, how = _again(client, assignment, excluded, allowed=job.requeue_allowed)
    rescued = run_store_lease.Rescued(
        at=now, job_id=assignment.job_id, restart_count=assignment.restart_count, node=node
    )
    append_line(Path(assignment.run_directory) / run_store_lease.RESCUES_NAME, msgspec.json.encode(rescued))
    why = f"{how}: its supervisor is gone"
    return Result(done=True, why=f"{why}; {besides}" if besides else why)


def _again(client: SlurmCommands, assignment: Assignment, excluded: list[str], *, allowed: bool) -> tuple[str, str]:
    """Requeue the job, or submit it again where Slurm may not; return what did not succeed besides, and how it went.

    Raises:
        SlurmError, OSError: neither was done.
    """
    name = assignment.slurm_name
    try:
        if allowed:
            return requeue.requeue(client, assignment, exclude=excluded), f"requeued job {name}"
    except SlurmError as error:
        if not error.forbidden:
            raise
    new = requeue.resubmit(client, assignment, exclude=excluded)
    return new.besides, f"job {name} is submitted again as job {new.job_id}"


def was_cancelled(job: JobFacts) -> bool:
    """Tell a cancelled job from one whose batch process died or ran into its limit: by Slurm's reason alone."""
    if preempted_at_last(job, None) and job.slurm_state in ("COMPLETING", "PREEMPTED"):
        return False
    return job.state in (JobState.COMPLETING, JobState.ENDED) and job.reason in ("None", "")


def _is_left(carried: journal.Carried, assignment: Assignment, node: str) -> bool:
    """Tell whether our supervisor has gone on without this node, which only its bus may have lost."""
    ours = carried.attempt == assignment.attempt + 1
    return ours and not carried.ended and bool(carried.nodes) and node not in carried.nodes


def _settled(run_directory: Path, assignment: Assignment, carried: journal.Carried) -> str:
    """Return why nothing is to be rescued; empty if something is."""
    held = lease.read(run_directory)
    if held is not None and held.epoch > (assignment.job_id, assignment.restart_count):
        return f"job {held.job_id} (restart {held.restart_count}) continues this run"
    said = records.read_outcome(run_directory)
    if said is not None and said.outcome == "finished":
        return f"the training finished at step {said.step}"
    if carried.attempt > assignment.attempt and carried.ended:
        return carried.previous
    return ""


def _spent(run_directory: Path) -> str:
    """Return why it is enough, when rescues followed each other without a new step directory."""
    known = lineage.read(run_directory / "checkpoints")
    newest = max((commit.at for commit in known.commits.values()), default=0.0) if known else 0.0
    count = sum(one.at > newest for one in run_store_lease.read_rescues(run_directory))
    if count < RESCUES_MAX:
        return ""
    return f"the supervisor died {count} times without a new step directory: manual repair is needed"
