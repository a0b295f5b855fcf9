"""What Slurm says of the job that a run waits for: why it waits, since when, and when it is expected to start."""

from __future__ import annotations

import itertools
from collections.abc import Collection
from enum import StrEnum

import msgspec

from stepkeeper.core import events as on
from stepkeeper.core.events import JobState
from stepkeeper.core.exits import ExitCode
from stepkeeper.core.state import Phase
from stepkeeper.printing import duration, instant
from stepkeeper.run_store import journal
from stepkeeper.run_store import submission as submissions
from stepkeeper.run_store.find import JOB
from stepkeeper.run_store.paths import RunDirectory
from stepkeeper.run_store.status import Status, heard_at
from stepkeeper.run_store.submission import Submission
from stepkeeper.slurm.client import SlurmError
from stepkeeper.slurm.jobs import call, job_state

WITHIN_S = 10.0
RECORDS_BACK_MAX = 100  # the answer to a requeue is one of an attempt's last records
_FORMAT = "--format=%i|%T|%S|%r"


class Waits(StrEnum):
    """Why nobody works on a run that continues without a person."""

    SUBMITTED = "submitted"
    REQUEUED = "requeued"
    FOLLOWED = "submitted again"  # by the supervisor, where Slurm may not requeue the job


class Waiting(msgspec.Struct, frozen=True, kw_only=True):
    """A run whose next job has not begun to work on it.  Instants are Unix seconds."""

    job: str
    since: float
    how: Waits
    log: str = ""  # of the job's batch script, where that is known


class Queued(msgspec.Struct, frozen=True, kw_only=True):
    """A job in Slurm's queue.  Instants are Unix seconds."""

    job: str
    state: str | None = None  # as Slurm writes it; None if it knows no such job, or did not say
    reason: str = ""  # why it waits
    expected_at: float | None = None  # when Slurm's plan has it start
    error: str = ""  # why nothing is known


def waiting(run: RunDirectory, status: Status | None) -> Waiting | None:
    """Return what a run waits for: its newest job without a record; None where one works on it, or it is over.

    Raises:
        OSError: the run directory cannot be read.
    """
    submitted = submissions.read(run.path)
    if submitted is not None and _is_newer(submitted, status):
        return Waiting(job=submitted.job, since=submitted.at, how=Waits.SUBMITTED, log=submitted.log)
    if status is None or status.exit_code != ExitCode.REQUEUED:
        return None
    log = submitted.log if submitted is not None else ""
    if (job := _followed_by(run, status)) is not None:
        return Waiting(job=job, since=status.updated_at, how=Waits.FOLLOWED, log=log)
    return Waiting(job=name(status), since=status.updated_at, how=Waits.REQUEUED, log=log)


def _is_newer(submitted: Submission, status: Status | None) -> bool:
    if status is None:
        return True
    if submitted.job in (str(status.job_id), status.slurm_name):
        return False  # it works on the run already, or has
    if status.phase == Phase.DONE and status.exit_code != ExitCode.REQUEUED:
        return submitted.at > status.started_at
    return submitted.at > heard_at(status)  # else the job that works on the run, or will again, counts


def name(status: Status) -> str:
    """Return the job of a status as Slurm's commands name it; people copy it into a shell."""
    return status.slurm_name if JOB.fullmatch(status.slurm_name or "") else str(status.job_id)


def query(job: str, within_s: float = WITHIN_S) -> Queued:
    """Ask Slurm for a job: a single call."""
    try:
        found = _squeue([job], within_s)
    except SlurmError as error:
        return Queued(job=job, error="" if error.forgotten else str(error))
    return msgspec.structs.replace(found[0], job=job) if found else Queued(job=job)


def query_all(jobs: Collection[str]) -> dict[str, Queued]:
    """Ask Slurm for several jobs by one call; what it does not know, or where it does not answer, is left out."""
    if not jobs:
        return {}
    try:
        return {each.job: each for each in _squeue(sorted(jobs), WITHIN_S)}
    except SlurmError:
        return {}  # the list of all runs shows what the run directories hold


def _squeue(jobs: Collection[str], within_s: float) -> list[Queued]:
    argv = ["squeue", "--noheader", "--array", "--states=all", f"--jobs={','.join(jobs)}", _FORMAT]
    found = []
    for line in call(argv, within_s, what="squeue").splitlines():
        job, state, expected, reason = (*line.strip().split("|", 3), "", "", "")[:4]
        found.append(
            Queued(
                job=job,
                state=state or None,
                reason="" if reason == "None" else reason,
                expected_at=float(expected) if expected.isdigit() else None,
            )
        )
    return found


def is_over(queued: Queued) -> bool:
    """Tell whether Slurm knows of no job that would go on."""
    if queued.error:
        return False
    return queued.state is None or job_state(queued.state) is JobState.ENDED


def is_pending(queued: Queued) -> bool:
    """Tell whether the job holds no nodes, and may get some."""
    return queued.state is not None and job_state(queued.state) is JobState.PENDING


def _followed_by(run: RunDirectory, status: Status) -> str | None:
    """Return the job that was submitted in place of an attempt's own, if there is one."""
    lines = journal.read_lines(run.journal, newest_first=True)
    for record, _ in itertools.islice(lines, RECORDS_BACK_MAX):
        if record is None or record.attempt != status.attempt:
            continue
        if isinstance(record.event, on.RequeueAnswered) and record.event.job_id is not None:
            return str(record.event.job_id)
    return None


def words(queued: Queued, now: float) -> str:
    """Return it as a person reads it, with what to do where nothing happens without a person."""
    if queued.error:
        return f"nothing: {queued.error}"
    if queued.state is None:
        return f"job {queued.job} is not in the queue any more: `sacct -j {queued.job}` shows how it ended"
    said = f"job {queued.job} is {queued.state}" + (f" ({queued.reason})" if queued.reason else "")
    if is_over(queued):
        return f"{said}: it does not continue without you"
    if "held" in queued.reason.lower():
        who = "an administrator does" if "admin" in queued.reason.lower() else "somebody does"
        return f"{said}: it waits until {who} `scontrol release {queued.job}`"
    if queued.state == "PENDING" and queued.expected_at is not None and queued.expected_at > now:
        at = instant(queued.expected_at)
        return f"{said}: expected to start in {duration(queued.expected_at - now)} ({at}), as Slurm plans now"
    if queued.state == "PENDING":
        return f"{said}: Slurm shows no expected start yet"
    return said
