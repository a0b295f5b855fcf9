"""Jobs with expedited requeue (`--requeue=expedite`, Slurm 25.11 and later), where Slurm itself acts on exit codes.

A script that ends with another code than 0 goes back into the queue, and is held there if its nodes are sound.  For a
run that is over, one would have to find and cancel a job that waits for ever: like any other, it ends as FAILED.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping

from stepkeeper.core.exits import ExitCode
from stepkeeper.slurm.client import SlurmError

PARAMETER = "enable_expedited_requeue"
# goes on, is over for Slurm too, or is best off held: `scontrol release` makes up for the requeue that failed
LEFT_TO_SLURM = frozenset(
    (
        ExitCode.FINISHED,
        ExitCode.REQUEUED,
        ExitCode.CANCELLED,
        ExitCode.SUPERSEDED,
        ExitCode.NO_BATCH_SCRIPT,
        ExitCode.REQUEUE_FAILED,
        ExitCode.UNDECIDED,
    )
)


def let_end(code: int, environment: Mapping[str, str], ask: Callable[..., str]) -> str:
    """See to it that a run which is over leaves no job behind that is held; return in words what was done.

    Args:
        code: with which we are about to end.
        environment: of this process.
        ask: calls a command of Slurm's, and returns what it says.

    Raises:
        SlurmError: Slurm holds such jobs, and does not take it: the job will be held.
    """
    if code in LEFT_TO_SLURM or environment.get("SLURM_TASK_PID") != str(os.getpid()):
        return ""
    array, task = environment.get("SLURM_ARRAY_JOB_ID"), environment.get("SLURM_ARRAY_TASK_ID")
    job = f"{array}_{task}" if array and task else environment.get("SLURM_JOB_ID", "")
    try:
        settings = ask("scontrol", "show", "config")
    except SlurmError:
        return ""  # nothing says that it would hold the job; who has asked it before has told that it does not answer
    if PARAMETER not in settings:
        return ""
    if not re.search(r"\sExpeditedRequeue=Yes(?:\s|$)", ask("scontrol", "-o", "show", "job", job)):
        return ""
    ask("scontrol", "update", f"JobId={job}", "Requeue=0")
    return f"job {job} has expedited requeue, and is over: Slurm is told not to put it back and hold it"
