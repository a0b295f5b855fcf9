"""`stepkeeper resume RUN`: submit a run again, as it was submitted."""

from __future__ import annotations

import argparse
import os
import shlex
import time
from pathlib import Path

import msgspec

from stepkeeper.cli import printing
from stepkeeper.core.events import JobState
from stepkeeper.core.exits import ExitCode
from stepkeeper.errors import StepkeeperError
from stepkeeper.redaction import redact_words
from stepkeeper.run_analytics import queue
from stepkeeper.run_store import find, run_registry
from stepkeeper.run_store import status as status_file
from stepkeeper.run_store import submission as submissions
from stepkeeper.run_store.paths import RunDirectory
from stepkeeper.run_store.submission import Submission
from stepkeeper.slurm import requeue
from stepkeeper.slurm.client import SlurmError
from stepkeeper.slurm.jobs import job_state
from stepkeeper.submit import preflight
from stepkeeper_trainer.formats import lease


def add(subcommands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    command = subcommands.add_parser(
        "resume",
        help="submit a run again as it was, to go on from its newest checkpoint",
        description="Submit a run again as it was submitted: the same batch script, options and settings, which are "
        "shown first.  It goes on in its run directory, from the newest verified checkpoint.  Other variables come "
        "from this shell.",
        allow_abbrev=False,
    )
    command.add_argument("run", nargs="?", metavar="RUN", help="run directory or job id (default: the run here)")
    command.add_argument(
        "--sbatch", metavar="OPTION", action="append", default=[], help="change one option: --sbatch=--time=2:00:00"
    )
    command.add_argument("--dry-run", action="store_true", help="show how it would be submitted; submit nothing")
    command.add_argument("--json", action="store_true", help="one JSON document")
    command.set_defaults(execute=execute)


@printing.reading
def execute(arguments: argparse.Namespace) -> int:
    """Submit a run again."""
    wrong = next((option for option in arguments.sbatch if not option.startswith("-")), None)
    if wrong is not None:
        raise StepkeeperError(f"--sbatch {wrong!r}: write the option with its dashes", ExitCode.USAGE)
    run = find.find(arguments.run, os.environ)
    preflight.require_open(run.path)
    newest = _newest_job(run)
    more = [*_after(run, newest), *arguments.sbatch]
    submission = _submission(run, newest)
    if not arguments.json:
        _show(submission, more)
    document = {"run_directory": str(run.path), "as_job": submission.job, "sbatch": _line(submission, more)}
    if arguments.dry_run:
        if arguments.json:
            printing.say_json({**document, "script": submission.script}, indent=2)
        return ExitCode.FINISHED
    job = _submit(run, submission, more)
    if arguments.json:
        printing.say_json({**document, "job": job}, indent=2)
    else:
        printing.say(f"job {job} is submitted; it goes on with {run.path}")
        printing.say(f"  see            stepkeeper status {job}")
        printing.say(f"  Slurm says     {queue.words(queue.query(job), time.time())}")
    return ExitCode.FINISHED


def _newest_job(run: RunDirectory) -> str:
    """Return the newest job of a run, as Slurm's commands name it.

    Raises:
        StepkeeperError: no job is known.
    """
    try:
        status = status_file.read(run.status)
    except msgspec.MsgspecError:
        status = None  # of a newer version: the other files may say
    waiting = queue.waiting(run, status)
    if waiting is not None:
        return waiting.job
    if status is not None:
        return queue.name(status)
    raise StepkeeperError(f"{run.path}: no job of this run is known: submit it with --run-dir", ExitCode.NOTHING_FOUND)


def _after(run: RunDirectory, job: str) -> list[str]:
    """Return what makes the new job wait for the end of the run's newest one, where that is ending.

    Raises:
        StepkeeperError: that one works on the run, or waits to do so; or Slurm does not answer.
    """
    queued = queue.query(job)
    if queued.error:
        raise StepkeeperError(f"job {job} may still be there: {queued.error}", ExitCode.NO_SLURM)
    if queue.is_over(queued):
        return []
    if queued.state is not None and job_state(queued.state) is JobState.COMPLETING:
        return [f"--dependency=afterany:{job}"]
    said = queue.words(queued, time.time())
    raise StepkeeperError(
        f"{said}: the run goes on already; `stepkeeper stop {run.path}` ends that first", ExitCode.RUN_BUSY
    )


def _submission(run: RunDirectory, newest: str) -> Submission:
    """Return how the run was submitted: as it was recorded, else as Slurm still knows.

    Raises:
        StepkeeperError: neither says so.
    """
    recorded = submissions.read(run.path)
    if recorded is not None and not recorded.secret:
        return recorded
    why = "no record of its submission"
    if recorded is not None:
        why = "its batch script or its options hold what looks like a secret, of which no copy is kept"
        if recorded.path and (script := _own(Path(recorded.path))):
            printing.warn(f"note: {recorded.path} is taken as it is now: of a script with a secret no copy is kept")
            return msgspec.structs.replace(recorded, script=script)
    try:
        return requeue.find_out(newest, {})
    except SlurmError as error:
        script = f" ({recorded.path})" if recorded is not None and recorded.path else ""
        raise StepkeeperError(
            f"{run.path}: {why}, and Slurm does not have it either ({error}); submit your batch script{script} again "
            f"with STEPKEEPER_RUN_DIR={run.typed}",
            ExitCode.NOTHING_FOUND,
        ) from error


def _own(path: Path) -> str:
    """Return the user's own batch script; empty where it is not there any more."""
    try:
        return path.read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return ""


def _line(submission: Submission, more: list[str]) -> str:
    """Return the command line of sbatch, as a person reads it."""
    script = submission.path or "(its batch script)"
    options = shlex.join(redact_words(["sbatch", *requeue.options(submission, more)]))
    arguments = shlex.join(redact_words(submission.arguments))
    return f"{options} {shlex.quote(script) if submission.path else script} {arguments}".rstrip()


def _show(submission: Submission, more: list[str]) -> None:
    printing.say(f"as job {submission.job} was submitted, in {submission.directory}:")
    printing.say(f"  {_line(submission, more)}")
    for name, value in sorted(submission.environment.items()):
        printing.say(f"  {name}={value}")
    if not submission.path:
        for line in submission.script.splitlines():
            if line.startswith(("#SBATCH", "exec ")):
                printing.say(f"  | {line}")
    for each in submission.unknown:
        printing.say(f"  not known: {each}")


def _submit(run: RunDirectory, submission: Submission, more: list[str]) -> str:
    """Submit it, and note the new job.

    Raises:
        StepkeeperError: Slurm refuses it.
    """
    try:
        held = lease.read(run.path)
    except lease.LeaseError as error:
        raise StepkeeperError(str(error), ExitCode.RUN_DIRECTORY) from error
    number = held.job_id if held is not None else submission.number
    try:
        job = requeue.submit(submission, run.path, number, more)
    except SlurmError as error:
        code = ExitCode.NO_SLURM if error.unreachable else ExitCode.START_FAILED
        raise StepkeeperError(f"Slurm refuses the job: {error}", code) from error
    try:
        log = requeue.log_of(job)
    except SlurmError:
        log = ""  # a help for people
    try:
        submissions.write(run.path, msgspec.structs.replace(submission, job=job, at=time.time(), log=log))
        run_registry.remember(run.path, os.environ)
    except OSError as error:
        printing.warn(f"warning: job {job} is submitted, and not noted in the run directory: {error}")
    return job
