"""`stepkeeper save RUN`, `stepkeeper stop RUN`: ask the supervisor of a run, and wait for what becomes of it."""

from __future__ import annotations

import argparse
import functools
import getpass
import itertools
import os
import time
from collections.abc import Callable
from typing import TypeVar

import msgspec

from stepkeeper import printing
from stepkeeper.cli.arguments import add_run
from stepkeeper.core import events as on
from stepkeeper.core.exits import ExitCode
from stepkeeper.core.state import Phase
from stepkeeper.errors import NotFoundError, StepkeeperError
from stepkeeper.run_analytics import queue
from stepkeeper.run_analytics.queue import Waiting
from stepkeeper.run_store import find, journal, requests
from stepkeeper.run_store import status as status_file
from stepkeeper.run_store.paths import RunDirectory
from stepkeeper.run_store.status import Status
from stepkeeper.slurm.client import SlurmError
from stepkeeper.slurm.jobs import call

T = TypeVar("T")
WITHIN_S = 900.0
LOOK_EVERY_S = 0.5
CANCELLED_WITHIN_S = 30.0
RECORDS_BACK_MAX = 10_000


def add(subcommands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare both commands."""
    save = subcommands.add_parser(
        "save",
        help="ask a run to save a checkpoint now, and to continue",
        description="Ask a run to save a checkpoint at the next step, and to continue.  Waits until it is committed.",
    )
    _declare(save, "save")
    stop = subcommands.add_parser(
        "stop",
        help="ask a run to save a checkpoint, and to end",
        description="Ask a run to save a checkpoint at the next step, and to end; it is not requeued.  A job that "
        "waits in the queue is cancelled: nothing runs that could save, and checkpoints of earlier attempts stay.  "
        "`stepkeeper resume` submits the run again, and it resumes.  (`scancel JOB` ends it without a checkpoint.)",
    )
    _declare(stop, "stop")


def _declare(command: argparse.ArgumentParser, kind: requests.Kind) -> None:
    """Add what both commands take."""
    add_run(command)
    command.add_argument("--no-wait", action="store_true", help="wait for the answer only, not until it is done")
    command.add_argument("--within", type=float, default=WITHIN_S, metavar="S", help="wait no longer than this")
    command.add_argument("--json", action="store_true", help="one JSON document")
    command.set_defaults(execute=_execute, kind=kind)


def _execute(arguments: argparse.Namespace) -> None:
    kind: requests.Kind = arguments.kind
    run = find.find(arguments.run, os.environ)
    give_up_at = time.monotonic() + arguments.within
    waiting = queue.waiting(run, status_file.require(run.status))
    if waiting is not None and _of_the_queue(arguments, run, waiting, give_up_at):
        return
    status = _alive(run)
    asked_at = time.time()
    ask = requests.Request(kind=kind, job_id=status.job_id, at=asked_at, by=getpass.getuser())
    name = requests.write(run.path, ask)
    over = functools.partial(status_file.is_over, run.status)
    try:
        answer = _until(lambda: requests.read_answer(run.path, name), give_up_at, or_when=over)
    except msgspec.MsgspecError as error:
        raise StepkeeperError(f"{run.path}: the answer cannot be read: {error}", ExitCode.RUN_DIRECTORY) from error
    if answer is None and over():
        requests.withdraw(run.path, name)
        raise NotFoundError("the run ended before it read this: see `stepkeeper status`")
    if answer is None:
        requests.withdraw(run.path, name)
        raise NotFoundError(
            f"no answer within {arguments.within:g} s, so the ask is taken back; is job {status.job_id} there? "
            f"see `squeue -j {status.job_id}` and `stepkeeper status {run.path}`"
        )
    if not answer.ok:
        raise NotFoundError(answer.said)
    if not arguments.json:
        printing.say(answer.said)
    found: dict[str, object] = {"said": answer.said}
    if not arguments.no_wait:
        found |= _saved(run, asked_at, give_up_at) if kind == "save" else _ended(run, status, give_up_at)
    _tell(arguments, run, found)


def _of_the_queue(arguments: argparse.Namespace, run: RunDirectory, waiting: Waiting, give_up_at: float) -> bool:
    """Stop a run whose job waits, by cancelling it; false where its supervisor is there meanwhile, and can be asked.

    Raises:
        StepkeeperError: there is nothing to save or to stop, or Slurm does not answer.
    """
    queued = queue.query(waiting.job)
    if queue.is_pending(queued) and arguments.kind == "stop":
        queued = _cancel(waiting.job, give_up_at)
        if queue.is_over(queued):
            _tell(arguments, run, _cancelled(run, waiting))
            return True
    said = queue.words(queued, time.time())
    if queued.error:
        raise StepkeeperError(f"job {waiting.job}: Slurm says {said}", ExitCode.NO_SLURM)
    if queue.is_over(queued) or queue.is_pending(queued):
        what = "nothing is running" if arguments.kind == "stop" else "nothing is running that could save"
        raise NotFoundError(f"{said}; {what}")
    begun = _until(lambda: queue.waiting(run, status_file.require(run.status)) is None or None, give_up_at)
    if not begun:
        raise NotFoundError(f"{said}, and its supervisor has written nothing yet: ask again")
    return False


def _cancel(job: str, give_up_at: float) -> queue.Queued:
    """Cancel a job if it still waits: one that has just started is asked to save; return what Slurm says then."""
    try:
        call(["scancel", "--state=PENDING", job], queue.WITHIN_S, what="scancel")
    except SlurmError as error:
        raise StepkeeperError(f"job {job} is not cancelled: {error}", ExitCode.NO_SLURM) from error

    def settled() -> queue.Queued | None:
        queued = queue.query(job)
        return None if queued.error or queue.is_pending(queued) else queued

    queued = _until(settled, min(give_up_at, time.monotonic() + CANCELLED_WITHIN_S))
    if queued is None:
        raise NotFoundError(f"scancel {job} is done, and Slurm still says that it waits")
    return queued


def _cancelled(run: RunDirectory, waiting: Waiting) -> dict[str, object]:
    status = status_file.require(run.status)
    step = status.checkpoint_step if status is not None else None
    kept = f"the checkpoint of step {step} stays" if step is not None else "it had no checkpoint"
    said = f"job {waiting.job} waited in the queue, and nothing of the run was running: it is cancelled; {kept}"
    return {"said": said, "cancelled": waiting.job, "checkpoint_step": step}


def _alive(run: RunDirectory) -> Status:
    status = status_file.require(run.status)
    if status is None or status.phase == Phase.DONE:
        raise NotFoundError(f"{run.path}: no supervisor works on this run now")
    return status


def _saved(run: RunDirectory, asked_at: float, give_up_at: float) -> dict[str, object]:
    """Wait for the next commit, or the word that the save failed."""
    over = functools.partial(status_file.is_over, run.status)
    ends = _until(lambda: _end_of_save(run, asked_at) or None, give_up_at, or_when=over)
    if not ends:
        raise NotFoundError("no new checkpoint yet; `stepkeeper status --follow` shows it")
    (found,) = ends
    if isinstance(found, on.CheckpointCommitted):
        return {"step": found.step, "directory": str(run.checkpoints / found.directory), "seconds": found.seconds}
    raise StepkeeperError(f"the save of step {found.step} failed: {found.error}", ExitCode.STORAGE)


def _end_of_save(run: RunDirectory, asked_at: float) -> list[on.CheckpointCommitted | on.SaveFailed]:
    """Return the newest end of a save since then; nothing before there is one."""
    for record, _ in itertools.islice(journal.read_lines(run.journal, newest_first=True), RECORDS_BACK_MAX):
        event = record.event if record is not None else None
        if event is not None and event.at < asked_at:
            break
        if isinstance(event, on.CheckpointCommitted | on.SaveFailed):
            return [event]
    return []


def _ended(run: RunDirectory, asked: Status, give_up_at: float) -> dict[str, object]:
    """Wait until the supervisor has left."""

    def over() -> Status | None:
        status = status_file.known(run.status)
        return status if status is not None and status.phase == Phase.DONE and status.exit_code is not None else None

    status = _until(over, give_up_at)
    if status is None:
        raise NotFoundError(f"job {asked.job_id} has not ended yet")
    return {"checkpoint_step": status.checkpoint_step, "exit_code": status.exit_code, "library": status.library}


def _tell(arguments: argparse.Namespace, run: RunDirectory, found: dict[str, object]) -> None:
    if arguments.json:
        printing.say_json(found)
        return
    if "directory" in found:
        printing.say(f"step {found['step']} is saved: {found['directory']}")
    if "exit_code" in found:
        printing.say(_end_in_words(found))
    if "cancelled" in found:
        printing.say(str(found["said"]))
    if "cancelled" in found or "exit_code" in found:
        printing.say(f"to continue: stepkeeper resume {run.path}")


def _end_in_words(found: dict[str, object]) -> str:
    if found["checkpoint_step"] is not None:
        return f"ended with the checkpoint of step {found['checkpoint_step']}"
    return "ended without a checkpoint" if found["library"] is not False else f"ended; {status_file.NO_LIBRARY}"


def _until(look: Callable[[], T | None], give_up_at: float, *, or_when: Callable[[], bool] = lambda: False) -> T | None:
    """Return what is looked for, once it is there; None when it is too late, or something else has happened."""
    while True:
        over = or_when()  # asked first: what came just before it counts
        found = look()
        if found is not None or over or time.monotonic() >= give_up_at:
            return found
        time.sleep(LOOK_EVERY_S)
