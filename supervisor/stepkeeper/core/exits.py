"""The supervisor's exit codes: one a reason, never renumbered.  `docs/exit-codes.md` is made from this."""

from __future__ import annotations

from enum import IntEnum
from typing import Self


class ExitCode(IntEnum):
    """Why the supervisor ended."""

    FINISHED = 0, "the training is finished"
    INTERNAL = 1, "a mistake in Stepkeeper itself: please report it"
    USAGE = 2, "an option, a value or an argument is wrong"
    REQUEUED = 10, "the job was requeued (by us or by Slurm) and continues in its next attempt"
    CANCELLED = 11, "the job was cancelled: it was stopped and not requeued"
    SUPERSEDED = 12, "a newer attempt of this run holds the lease: this one stopped its ranks"
    NO_BATCH_SCRIPT = (
        13,
        "the allocation of salloc or srun ends, and Slurm cannot requeue it: run again to continue",
    )
    TRAINING_FAILED = 20, "the training failed repeatedly without new progress: manual repair is needed"
    TRAINING_GAVE_UP = 21, "a rank exited with 93: the launcher asks not to be started again"
    START_FAILED = 22, "watchers or training could not be started"
    STORAGE = 23, "the checkpoint storage fails or does not answer"
    REQUEUE_FAILED = 24, "Slurm did not take the requeue; what was saved is safe"
    UNDECIDED = 25, "Slurm could not be asked why it stops the job: saved, not requeued"
    NODES_LOST = 26, "nodes were lost or faulty repeatedly without new progress"
    STOPPED = 27, "stopped on request of a person or of the ranks, with time to save: run again to continue"
    NODES_UNFIT = 28, "most nodes fail the checks before a launch, and did not recover"
    CAUSE_STAYS = 29, "the training failed for a cause that another start does not change: manual repair is needed"
    NO_SLURM = 30, "not inside a Slurm job, or Slurm's commands are missing"
    NOT_BATCH_PROCESS = 31, "not the batch process: start it with `exec` in the batch script"
    RUN_DIRECTORY = 32, "the run directory cannot be used"
    RUN_BUSY = 33, "another job's live supervisor holds this run directory"
    CODE_CHANGED = 34, "the code differs from that of the attempt before, which --same-code forbids"
    RUN_DIRECTORY_GONE = 35, "the run directory is gone: somebody removed it while the supervisor ran"
    NOTHING_FOUND = 40, "no such run, step directory or record"
    NOT_VERIFIED = 41, "a checkpoint is damaged or incomplete, or a pointer file names the wrong one"
    SITE_UNFIT = 42, "the doctor found a problem, or the self-test did not pass"

    meaning: str

    def __new__(cls, value: int, meaning: str) -> Self:
        """Attach the meaning to the number."""
        member = int.__new__(cls, value)
        member._value_ = value
        member.meaning = meaning
        return member

    @property
    def needs_person(self) -> bool:
        """Whether the run goes on only when somebody has done something about it."""
        return self in _NEEDS_PERSON


_NEEDS_PERSON = frozenset(
    (
        ExitCode.NO_BATCH_SCRIPT,
        ExitCode.TRAINING_FAILED,
        ExitCode.TRAINING_GAVE_UP,
        ExitCode.START_FAILED,
        ExitCode.STORAGE,
        ExitCode.REQUEUE_FAILED,
        ExitCode.UNDECIDED,
        ExitCode.NODES_LOST,
        ExitCode.NODES_UNFIT,
        ExitCode.CAUSE_STAYS,
        ExitCode.CODE_CHANGED,
        ExitCode.RUN_DIRECTORY_GONE,
    )
)
