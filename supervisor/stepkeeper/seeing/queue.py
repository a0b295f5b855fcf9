"""What Slurm says of the job that a run waits for: a job that was requeued and is held waits for ever, silently."""

from __future__ import annotations

import itertools

import msgspec

from stepkeeper.core import events as on
from stepkeeper.core.events import JobState
from stepkeeper.printing import duration
from stepkeeper.slurm.calling import call
from stepkeeper.slurm.client import SlurmError
from stepkeeper.slurm.commands import job_state
from stepkeeper.store import journal
from stepkeeper.store.rundir import RunDirectory
from stepkeeper.store.status import Status

WITHIN_S = 10.0
RECORDS_BACK_MAX = 100  # the answer to a requeue is one of an attempt's last records


class Queued(msgspec.Struct, frozen=True, kw_only=True):
    """A job in Slurm's queue.  Instants are Unix seconds."""

    job: str
    state: str | None = None  # as Slurm writes it; None if it knows no such job, or did not say
    reason: str = ""  # why it waits
    expected_at: float | None = None  # when Slurm's plan has it start
    error: str = ""  # why nothing is known


def ask(run: RunDirectory, status: Status) -> Queued:
    """Ask Slurm for the job that goes on with a run, as its status tells: a single call."""
    job = _next_job(run, status)
    argv = ["squeue", "--noheader", "--states=all", f"--jobs={job}", "--format=%T|%S|%r"]
    try:
        said = call(argv, WITHIN_S, what="squeue")
    except SlurmError as error:
        return Queued(job=job, error="" if error.forgotten else str(error))
    state, expected, reason = (*next(iter(said.splitlines()), "").strip().split("|", 2), "", "")[:3]
    return Queued(
        job=job,
        state=state or None,
        reason="" if reason == "None" else reason,
        expected_at=float(expected) if expected.isdigit() else None,
    )


def is_over(queued: Queued) -> bool:
    """Tell whether Slurm knows of no job that would go on."""
    if queued.error:
        return False
    return queued.state is None or job_state(queued.state) is JobState.ENDED


def _next_job(run: RunDirectory, status: Status) -> str:
    """Return the job that was submitted in place of an attempt's own, else that one."""
    lines = journal.read_lines(run.journal, newest_first=True)
    for record, _ in itertools.islice(lines, RECORDS_BACK_MAX):
        if record is None or record.attempt != status.attempt:
            continue
        if isinstance(record.event, on.RequeueAnswered) and record.event.job_id is not None:
            return str(record.event.job_id)
    return status.slurm_name or str(status.job_id)


def words(queued: Queued, now: float) -> str:
    """Return it as a person reads it, with what to do where nothing will happen by itself."""
    if queued.error:
        return f"nothing: {queued.error}"
    if queued.state is None:
        return f"job {queued.job} is not in the queue any more: `sacct -j {queued.job}` tells how it ended"
    told = f"job {queued.job} is {queued.state}" + (f" ({queued.reason})" if queued.reason else "")
    if is_over(queued):
        return f"{told}: nothing goes on by itself"
    if "held" in queued.reason.lower():
        who = "an administrator does" if "admin" in queued.reason.lower() else "somebody does"
        return f"{told}: it waits until {who} `scontrol release {queued.job}`"
    if queued.state == "PENDING" and queued.expected_at is not None and queued.expected_at > now:
        return f"{told}: to start in {duration(queued.expected_at - now)}, as Slurm plans now"
    return told
