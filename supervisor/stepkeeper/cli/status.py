"""`stepkeeper status [RUN]`: where a run stands, on one screen; without RUN, all runs that there are."""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

import msgspec

from stepkeeper import printing
from stepkeeper.core.exits import ExitCode
from stepkeeper.core.state import Phase
from stepkeeper.errors import NotFoundError, StepkeeperError, UsageError
from stepkeeper.printing import duration
from stepkeeper.run_analytics import queue, reading
from stepkeeper.run_analytics.glance import Glance, attempt, facts, glance, loss, state, steps
from stepkeeper.run_analytics.model import exit_meaning
from stepkeeper.run_analytics.screen import with_bar
from stepkeeper.run_store import find
from stepkeeper.run_store import status as status_file
from stepkeeper.run_store.paths import RunDirectory
from stepkeeper.run_store.status import heard_at
from stepkeeper.slurm import requeue

ANSWERED_BY_THE_QUEUE = ("status", "events", "explain", "logs")  # while a job waits, that is all that there is to show
GOES_ON_OR_IS_FINISHED = (None, ExitCode.FINISHED, ExitCode.REQUEUED, ExitCode.SUPERSEDED)
RECORDS_BACK_MAX = 20_000  # two weeks of progress records
WIDTH = 68  # columns of a bar and the words beside it
RUNS_MAX = 100  # lines of the list of all runs
_HEADINGS = ("RUN", "PHASE", "JOB", "ATTEMPT", "STEP", "LOSS", "SAVED", "UPDATED")


def add(subcommands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    command = subcommands.add_parser("status", help="show where a run stands", description="Show where a run stands.")
    command.add_argument(
        "run",
        nargs="?",
        metavar="RUN",
        help="run directory or job id (default: the run in this directory, or STEPKEEPER_RUN_DIR; else all runs)",
    )
    command.add_argument(
        "--all", action="store_true", help="all runs below runs/, and those that you have started elsewhere"
    )
    command.add_argument("--follow", "-f", action="store_true", help="stay and show what changes, until the run ends")
    command.add_argument("--json", action="store_true", help="one JSON document")
    command.add_argument(
        "--web",
        action="store_true",
        help="show the run in a browser, up to date (docs/report.md); prints the URL, and how to open it from "
        "another computer",
    )
    where = command.add_mutually_exclusive_group()
    where.add_argument(
        "--port", type=int, metavar="PORT", help="with --web: the port on 127.0.0.1 (default: a free one)"
    )
    where.add_argument(
        "--socket", metavar="PATH", help="with --web: a Unix socket that only this account can open, instead of a port"
    )
    command.set_defaults(execute=execute)


def execute(arguments: argparse.Namespace) -> None:
    """Print the status of a run, or of all."""
    _require_one_way(arguments)
    # a supervisor, which knows all commands, stays small
    if arguments.web:
        from stepkeeper.run_analytics.web import serve  # noqa: PLC0415

        socket_path = Path(os.path.abspath(arguments.socket)) if arguments.socket is not None else None
        serve(find.find(arguments.run, os.environ), port=arguments.port or 0, socket_path=socket_path)
        return
    if arguments.follow:
        from stepkeeper.run_analytics.follow import follow  # noqa: PLC0415

        follow(find.find(arguments.run, os.environ))
        return
    unsaid = arguments.run is None and not arguments.json  # programs get one document
    if arguments.all or (unsaid and not find.is_here(os.environ)):
        found = find.every(os.environ)
        if arguments.all or len(found) > 1:
            _show_list(found, as_json=arguments.json)
            return
    run = find.find(arguments.run, os.environ)
    seen = glance(run, status_file.require(run.status), records_max=RECORDS_BACK_MAX)
    if seen.status is None and seen.waiting is None:
        raise NotFoundError(f"{run.status}: not there: no supervisor has worked on this run yet, or it could not write")
    condition = reading.condition_of(Path(seen.checkpoint), run) if seen.checkpoint else ""
    job = seen.asks_slurm(time.time())
    seen = msgspec.structs.replace(
        seen, checkpoint_state=condition, queued=queue.query(job) if job is not None else None
    )
    _show(run, seen, as_json=arguments.json, asked_for=arguments.run or "")


def _require_one_way(arguments: argparse.Namespace) -> None:
    """Refuse options that go without each other.

    Raises:
        StepkeeperError: which ones.
    """
    wrong = ""
    if arguments.run is not None and arguments.all:
        wrong = "--all goes without RUN"
    elif arguments.web and (arguments.follow or arguments.json or arguments.all):
        wrong = "--web shows one run: it goes without --follow, --json and --all"
    elif not arguments.web and (arguments.port is not None or arguments.socket is not None):
        wrong = "--port and --socket go with --web"
    elif arguments.follow and (arguments.json or arguments.all):
        wrong = "--follow shows one run, for people: it goes without --json and --all"
    if wrong:
        raise UsageError(wrong)


# One run.


def _show(run: RunDirectory, seen: Glance, *, as_json: bool, asked_for: str = "") -> None:
    now = time.time()
    if as_json:
        printing.say_json({"run_directory": str(run.path), **_document(seen, now)})
        return
    plain = "utf" not in (sys.stdout.encoding or "").lower()
    rows = [("run", str(run.path))]
    rows += [(label, with_bar(label, words, seen, WIDTH, plain=plain)) for label, words in facts(seen, now)]
    newest = _job(seen)
    if seen.status is None:
        rows.append(("logs", f"{run.path / 'logs'} (ranks, once they start)"))
    if find.is_job(asked_for) and asked_for.isdigit() and asked_for != newest:
        rows.append(("earlier", f"job {asked_for} worked on this run before"))
    printing.say_table(rows)
    printing.say()
    if seen.status is not None:
        printing.say(f"events: stepkeeper events {run.path}    logs: stepkeeper logs {run.path}")
    for line in _how_to_go_on(run, seen, newest):
        printing.say(line)


def _job(seen: Glance) -> str:
    if seen.waiting is not None:
        return seen.waiting.job
    return str(seen.status.job_id) if seen.status is not None else ""


def _how_to_go_on(run: RunDirectory, seen: Glance, job: str) -> list[str]:
    """Say what to type to follow, stop or continue a run."""
    status = seen.status
    if seen.waiting is not None and not seen.is_over:
        stop = f"to stop: stepkeeper stop {run.typed}, or scancel {job}; its checkpoints stay"
        return [f"follow: stepkeeper status --follow {run.typed}", stop]
    if status is not None and status.phase != Phase.DONE:
        return [f"to stop: stepkeeper stop {run.typed} (saves first), or scancel {job}"]
    if seen.waiting is not None or (status is not None and status.exit_code not in GOES_ON_OR_IS_FINISHED):
        return [f"to continue: stepkeeper resume {run.typed}"]
    return []


def _document(seen: Glance, now: float) -> dict[str, Any]:
    """Return what is known of a run, for programs: the status document, and what follows from it."""
    status, queued = seen.status, {"waiting": seen.waiting, "queue": seen.queued}
    if status is None:
        return {"phase": "pending", "done": False, **queued}
    left_s = seen.seconds_left
    return {
        **msgspec.structs.asdict(status),
        "done": status.phase == Phase.DONE,
        "phase_since": seen.phase_since,
        "updated_ago_s": round(max(0.0, now - status.updated_at), 3),
        "heard_ago_s": round(max(0.0, now - heard_at(status)), 3),
        "silent": status_file.is_silent(status, now),
        "progress": seen.share,
        "pace_s": seen.pace,
        "seconds_left": left_s,
        "done_at": now + left_s if left_s is not None and seen.trains(now) else None,
        "exit_meaning": exit_meaning(status.exit_code) if status.exit_code is not None else None,
        "checkpoint_directory": seen.checkpoint or None,
        "checkpoint_state": seen.checkpoint_state or None,
        **queued,
    }


# A run whose job waits in Slurm's queue and has not worked on it yet: what every command can say of it.


def answers(arguments: argparse.Namespace) -> bool:
    """Answer a command that found nothing, because the run's job still waits; false where that is not why."""
    wanted = getattr(arguments, "run", None)
    if not isinstance(wanted, str) or arguments.command not in ANSWERED_BY_THE_QUEUE:
        return False
    as_json = getattr(arguments, "json", False)
    try:
        run = find.find(wanted, os.environ)
    except (StepkeeperError, OSError):
        return find.is_job(wanted) and _answers_of_slurm(wanted, as_json=as_json)
    try:
        waiting = queue.waiting(run, None) if status_file.read(run.status) is None else None
    except (OSError, msgspec.MsgspecError):
        return False  # the command's own words say more
    if waiting is not None:
        _show(run, Glance(status=None, waiting=waiting, queued=queue.query(waiting.job)), as_json=as_json)
    return waiting is not None


def _answers_of_slurm(job: str, *, as_json: bool) -> bool:
    """Print what Slurm says of a job that waits, and that sbatch itself has submitted; false where it knows none."""
    queued = queue.query(job)
    if not queue.is_pending(queued):
        return False
    if as_json:
        printing.say_json({"run_directory": None, "phase": "pending", "done": False, "queue": queued})
        return True
    rows = [
        ("phase", "pending"),
        ("Slurm says", queue.words(queued, time.time())),
        ("run", "not known yet: `stepkeeper run` makes its directory when the job starts"),
        ("log", requeue.log_of(job) or "not known"),
    ]
    printing.say_table(rows)
    return True


# All runs that there are, one a line.


def _show_list(runs: list[RunDirectory], *, as_json: bool) -> None:
    """Print one line a run, the newest first; what cannot be read is said in its line."""
    now = time.time()
    looks = [(run, *_look(run)) for run in runs[:RUNS_MAX]]
    queued = queue.query_all({seen.waiting.job for _, seen, _ in looks if seen.waiting is not None})
    looks = [
        (run, msgspec.structs.replace(seen, queued=queued.get(_job(seen)) if seen.waiting is not None else None), why)
        for run, seen, why in looks
    ]
    if as_json:
        printing.say_json([_listed(run, seen, problem, now) for run, seen, problem in looks])
    elif runs:
        rows = [_row(run, seen, problem, now) for run, seen, problem in looks]
        printing.say_table([_HEADINGS, *rows], right=frozenset((2, 3, 4, 5, 6)))
        if len(runs) > RUNS_MAX:
            printing.say(f"and {len(runs) - RUNS_MAX} older ones")
    else:
        printing.say("no runs below runs/ here, and none that this account has started")


def _look(run: RunDirectory) -> tuple[Glance, str]:
    """Return what status and submission say of a run, and why nothing is known."""
    try:
        status = status_file.read(run.status)
        seen = Glance(status=status, waiting=queue.waiting(run, status))
    except (OSError, msgspec.MsgspecError) as error:
        return Glance(status=None), f"its status cannot be read: {getattr(error, 'strerror', None) or error}"
    return seen, "no supervisor yet" if status is None and seen.waiting is None else ""


def _listed(run: RunDirectory, seen: Glance, problem: str, now: float) -> dict[str, Any]:
    status = seen.status
    document: dict[str, Any] = msgspec.structs.asdict(status) if status is not None else {}
    document["run_directory"] = str(run.path)
    if status is not None:
        document["silent"] = status_file.is_silent(status, now)
    if problem:
        document["problem"] = problem
    if seen.waiting is not None:
        document |= {"waiting": seen.waiting, "queue": seen.queued}
    return document


def _row(run: RunDirectory, seen: Glance, problem: str, now: float) -> tuple[str, ...]:
    status, reason = seen.status, seen.queued.reason if seen.queued is not None else ""
    word = problem or state(seen, now) + (f" ({reason})" if reason else "")
    since = heard_at(status) if status is not None else seen.waiting.since if seen.waiting is not None else None
    updated = "" if since is None else f"{duration(max(0.0, now - since))} ago"
    here = os.path.relpath(run.path)  # as it can be typed from here
    name = here if len(here) < len(str(run.path)) and not here.startswith("..") else str(run.path)
    if status is None:
        return (name, word, _job(seen), "", "", "", "", updated)
    return (
        name,
        word,
        _job(seen),
        attempt(status),
        "-" if status.step is None else steps(status),
        loss(status).removeprefix("loss ") or "-",
        printing.or_dash(status.checkpoint_step),
        updated,
    )
