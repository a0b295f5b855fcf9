"""How a job was submitted, as its supervisor and Slurm know it, and submitting it again in the same way."""

from __future__ import annotations

import os
import re
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from stepkeeper.run_store import submission as submissions
from stepkeeper.run_store.submission import Submission
from stepkeeper.slurm import resubmission
from stepkeeper.slurm.client import SlurmError
from stepkeeper.slurm.jobs import call
from stepkeeper.slurm.launch import as_submitted

CALL_WITHIN_S = 20.0
SUBMIT_WITHIN_S = 60.0
_OF_THAT_TIME = ("--dependency=", "--comment=", "--deadline=")  # options that make no sense for a later job
_SCRIPT = "batch.sh"  # name of a script that came from sbatch's standard input


def find_out(
    job: str, environment: Mapping[str, str], words: Sequence[str] = (), nodes: int | None = None
) -> Submission:
    """Ask Slurm how a job was submitted.

    Args:
        job: as Slurm's commands name it.
        environment: of the batch process; empty where it is not known.
        words: the supervisor's own command line.
        nodes: of the job as it was submitted; what Slurm shows, if that is not known.

    Raises:
        SlurmError: Slurm does not know the job any more, keeps no batch script of it, or does not answer.
    """
    shown = call(["scontrol", "-o", "show", "job", job], CALL_WITHIN_S, what="scontrol show job").splitlines()[0]
    script = call(["scontrol", "write", "batch_script", job, "-"], CALL_WITHIN_S, what="scontrol write batch_script")
    if not script.startswith("#!"):
        raise SlurmError(f"scontrol write batch_script: Slurm keeps no batch script of job {job}")
    fields = resubmission.fields(shown)
    planned = resubmission.plan(
        shown,
        script,
        as_submitted(environment),
        words,
        nodes=nodes or _nodes(fields),
        exclude=fields.get("ExcNodeList", ""),
        comment="",
    )
    return Submission(
        job=job,
        at=float(fields["SubmitTime"]) if fields.get("SubmitTime", "").isdigit() else time.time(),
        directory=environment.get("SLURM_SUBMIT_DIR") or planned.directory,
        log=fields.get("StdOut", ""),
        script=script,
        path=planned.script or "",
        options=tuple(option for option in planned.options if not option.startswith(_OF_THAT_TIME)),
        arguments=planned.arguments,
        environment=submissions.settings(as_submitted(environment)),
        unknown=planned.unknown if environment else (*planned.unknown, "settings that were variables of its shell"),
    )


def log_of(job: str) -> str:
    """Return where Slurm writes the log of a job; empty where it does not say.  Raises `SlurmError`."""
    shown = call(["scontrol", "-o", "show", "job", job], CALL_WITHIN_S, what="scontrol show job")
    return resubmission.fields(shown.splitlines()[0]).get("StdOut", "")


def options(submission: Submission, more: Sequence[str] = ()) -> list[str]:
    """Return the options of sbatch for the same job again: those of then, what must be exported, and `more`."""
    found = list(submission.options)
    if not any(option.startswith("--export=") for option in found):
        directive = re.search(r"^#SBATCH\s+(?:.*\s)?--export[= ](\S+)", submission.script, re.MULTILINE)
        if directive is not None:  # else it is ALL
            found.append(f"--export={resubmission.export(directive.group(1))}")
    return [*found, *more]


def submit(submission: Submission, run_directory: Path, number: int, more: Sequence[str] = ()) -> str:
    """Submit a job again, to go on with its run, and return the new one as Slurm's commands name it.

    Args:
        submission: how it was submitted.
        run_directory: absolute.
        number: of the job that had the run last.
        more: options of sbatch besides.

    Raises:
        SlurmError: Slurm refuses it, or does not answer.
        OSError: its script cannot be handed over.
    """
    environment = {
        **resubmission.environment_of(os.environ, str(run_directory), str(number)),
        **submission.environment,
    }
    place = submission.directory if os.path.isdir(submission.directory) else os.getcwd()
    with tempfile.TemporaryDirectory(prefix="stepkeeper-") as directory:  # ours alone
        path = Path(directory, os.path.basename(submission.path) or _SCRIPT)
        path.write_text(submission.script, encoding="utf-8", errors="surrogateescape")
        argv = ["sbatch", "--parsable", *options(submission, more), str(path), *submission.arguments]
        said = call(
            argv, SUBMIT_WITHIN_S, what="sbatch", environment=environment, instead_of_ours=True, directory=place
        )
    job = said.strip().partition(";")[0]
    if not job.isdigit():
        raise SlurmError(f"sbatch answered {said[:200]!r}: no job id")
    task = next((option.partition("=")[2] for option in submission.options if option.startswith("--array=")), "")
    return f"{job}_{task}" if task else job


def _nodes(fields: Mapping[str, str]) -> int:
    """Return how many nodes Slurm shows: `2`, or `2-4` of a job that waits."""
    match = re.match(r"\d+", fields.get("NumNodes", ""))
    return int(match.group()) if match else 1
