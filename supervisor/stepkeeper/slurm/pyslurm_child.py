"""The process in which pyslurm lives: one JSON request a line comes in, one answer goes out.

Started by path, with an interpreter that has pyslurm, which may be another one than ours: only the standard library
and pyslurm may be imported here.  Without a slurm.conf the import of pyslurm ends the process, which is why it has one.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

UNREACHABLE = range(1800, 1900)  # slurm_errno.h: the controller could not be asked, or did not answer
NO_SUCH_JOB = 2017  # ESLURM_INVALID_JOB_ID
NEVER_S = 0xFFFFFFFE - 1  # NO_VAL and INFINITE stand for no time


def main() -> None:
    """Serve until standard input ends."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb", buffering=0)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what a library prints is no answer
    import pyslurm  # noqa: PLC0415 - it may end the process, and print

    serve(pyslurm, answers.write)


def serve(pyslurm: Any, answer: Callable[[bytes], object]) -> None:
    """Answer each line of standard input."""
    calls: dict[str, Callable[..., Any]] = {
        "job": lambda job: job_facts(pyslurm.Job.load(job)),
        "settings": lambda: settings(pyslurm.slurmctld.Config.load()),
        "requeue": lambda job: pyslurm.Job(job).requeue(),
        "exclude": lambda job, nodes: pyslurm.Job(job).modify(pyslurm.JobSubmitDescription(excluded_nodes=nodes)),
    }
    for line in sys.stdin:
        what, *arguments = json.loads(line)
        reply: dict[str, Any]
        try:
            reply = {"result": calls[what](*arguments)}
        except pyslurm.RPCError as error:
            number = error.errno if isinstance(error.errno, int) else -1
            reply = {"error": str(error), "unreachable": number in UNREACHABLE, "no_such_job": number == NO_SUCH_JOB}
        answer(json.dumps(reply).encode() + b"\n")


def job_facts(job: Any) -> dict[str, Any]:
    """Return what we need of a job, as `scontrol show job` would print it."""
    return {
        "id": job.id,
        "slurm_state": job.state,
        "restarts": job.requeue_count,
        "reason": (job.state_reason or "None").replace(" ", "_"),
        "preempt_at": instant(job.preempt_time),
        "end_at": end_at(instant(job.end_time), job.time_limit),
        "requeue_allowed": bool(job.is_requeueable),
        "batch": bool(job.is_batch_job),
        "excluded": job.excluded_nodes or "",
        "required": job.required_nodes or "",
    }


def settings(config: Any) -> dict[str, Any]:
    """Return what we need of the cluster's settings."""
    return {
        "kill_wait_s": float(config.kill_wait_time),
        "version": config.version,
        "accounting": "slurmdbd" in (config.accounting_storage_type or ""),
    }


def end_at(end: float | None, limit_min: Any) -> float | None:
    """Return the end of a job; without a time limit Slurm's commands show none, and Slurm itself a year."""
    unlimited = not isinstance(limit_min, int) or limit_min >= NEVER_S
    return None if end is None or (unlimited and end > time.time()) else end


def instant(seconds: Any) -> float | None:
    """Return Unix seconds, None where Slurm has no such time."""
    return float(seconds) if isinstance(seconds, int) and 0 < seconds < NEVER_S else None


if __name__ == "__main__":
    main()
