"""`stepkeeper status [RUN]`: where a run stands, on one screen; without RUN, all runs that there are."""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import time
from pathlib import Path
from typing import Any

import msgspec

from stepkeeper.cli import printing
from stepkeeper.cli.printing import duration, instant
from stepkeeper.core.exits import ExitCode
from stepkeeper.core.state import Phase
from stepkeeper.errors import StepkeeperError
from stepkeeper.run_analytics import progress, queue, reading
from stepkeeper.run_analytics.queue import Queued, Waiting
from stepkeeper.run_analytics.screen import WAITS_FOR, exit_meaning, held_in_memory, rows
from stepkeeper.run_store import find, journal
from stepkeeper.run_store import status as status_file
from stepkeeper.run_store.paths import RunDirectory
from stepkeeper.run_store.status import Status, heard_at, is_silent
from stepkeeper.slurm import requeue
from stepkeeper.slurm.client import SlurmError

# A run whose job waits in Slurm's queue and has not worked on it yet: what every command can say of it.

ANSWERED_BY_THE_QUEUE = ("status", "events", "explain", "logs")  # the wait is all that there is to show


def show_pending(run: RunDirectory, waiting: Waiting, queued: Queued | None, *, as_json: bool) -> int:
    """Print where a run stands that no supervisor has worked on yet."""
    now = time.time()
    if as_json:
        document = {
            "run_directory": str(run.path),
            "phase": "pending",
            "done": False,
            "waiting": msgspec.to_builtins(waiting),
            "queue": msgspec.to_builtins(queued),
        }
        printing.say_json(document, indent=2)
        return ExitCode.FINISHED
    over = queued is not None and queue.is_over(queued)
    rows = [
        ("run", str(run.path)),
        ("phase", f"{'gone before it started' if over else 'pending'}, {waited(waiting, now)}"),
        ("Slurm says", queue.words(queued, now) if queued is not None else "nothing"),
        ("job", f"{waiting.job}; no supervisor has worked on this run yet"),
        ("logs", f"{run.path / 'logs'} (ranks, once they start)" + (f"; {waiting.log}" if waiting.log else "")),
    ]
    printing.say_table(rows)
    printing.say()
    if over:
        printing.say(f"to submit it again: stepkeeper resume {run.typed}")
    else:
        printing.say(f"follow: stepkeeper status --follow {run.typed}")
        printing.say(f"to stop: stepkeeper stop {run.typed}, or scancel {waiting.job}")
    return ExitCode.FINISHED


def waited(waiting: Waiting, now: float) -> str:
    """Say for how long a job has been waited for."""
    return f"for {duration(max(0.0, now - waiting.since))} ({waiting.how.value} {instant(waiting.since)})"


def answers(arguments: argparse.Namespace) -> int | None:
    """Answer a command that found nothing, because the run's job still waits; None where that is not why.

    Returns:
        the exit code.
    """
    wanted = getattr(arguments, "run", None)
    if not isinstance(wanted, str) or arguments.command not in ANSWERED_BY_THE_QUEUE:
        return None
    as_json = getattr(arguments, "json", False)
    try:
        run = find.find(wanted, os.environ)
    except (StepkeeperError, OSError):
        return _of_slurm(wanted, as_json=as_json) if find.is_job(wanted) else None
    try:
        if status_file.read(run.status) is not None:
            return None
        waiting = queue.waiting(run, None)
    except (OSError, msgspec.MsgspecError):
        return None  # the command's own words say more
    return show_pending(run, waiting, queue.query(waiting.job), as_json=as_json) if waiting is not None else None


def _of_slurm(job: str, *, as_json: bool) -> int | None:
    """Print what Slurm says of a job that waits, and that sbatch itself has submitted; None where it knows none."""
    queued = queue.query(job)
    if not queue.is_pending(queued):
        return None
    if as_json:
        document = {"run_directory": None, "phase": "pending", "done": False, "queue": msgspec.to_builtins(queued)}
        printing.say_json(document, indent=2)
        return ExitCode.FINISHED
    try:
        log = requeue.log_of(job)
    except SlurmError:
        log = ""
    rows = [
        ("phase", "pending"),
        ("Slurm says", queue.words(queued, time.time())),
        ("run", "not known yet: `stepkeeper run` makes its directory when the job starts"),
        ("log", log or "not known"),
    ]
    printing.say_table(rows)
    return ExitCode.FINISHED


# `stepkeeper status` without RUN: all runs that there are, one a line.

RUNS_MAX = 100  # lines of the list of all runs
_HEADINGS = ("RUN", "PHASE", "JOB", "ATTEMPT", "STEP", "LOSS", "SAVED", "UPDATED")


class _Look(msgspec.Struct, frozen=True):
    run: RunDirectory
    status: Status | None
    waiting: Waiting | None
    problem: str = ""


def show_list(runs: list[RunDirectory], *, as_json: bool) -> int:
    """Print one line a run, the newest first; what cannot be read is said in its line."""
    now = time.time()
    looks = [_look(run) for run in runs[:RUNS_MAX]]
    queued = queue.query_all({look.waiting.job for look in looks if look.waiting is not None})
    if as_json:
        printing.say_json([_document(look, queued, now) for look in looks], indent=2)
    elif runs:
        printing.say_table([_HEADINGS, *(_row(look, queued, now) for look in looks)], right=frozenset((2, 3, 4, 5, 6)))
        if len(runs) > RUNS_MAX:
            printing.say(f"and {len(runs) - RUNS_MAX} older ones")
    else:
        printing.say("no runs below runs/ here, and none that this account has started")
    return ExitCode.FINISHED


def _look(run: RunDirectory) -> _Look:
    try:
        status = status_file.read(run.status)
        waiting = queue.waiting(run, status)
    except (OSError, msgspec.MsgspecError) as error:
        why = f"its status cannot be read: {getattr(error, 'strerror', None) or error}"
        return _Look(run, None, None, why)
    problem = "no supervisor yet" if status is None and waiting is None else ""
    return _Look(run, status, waiting, problem)


def _document(look: _Look, queued: dict[str, Queued], now: float) -> dict[str, Any]:
    document: dict[str, Any] = {"run_directory": str(look.run.path)}
    if look.status is not None:
        document = {**msgspec.to_builtins(look.status), **document, "silent": is_silent(look.status, now)}
    if look.problem:
        document["problem"] = look.problem
    if look.waiting is not None:
        found = queued.get(look.waiting.job)
        document |= {"waiting": msgspec.to_builtins(look.waiting), "queue": msgspec.to_builtins(found)}
    return document


def _row(look: _Look, queued: dict[str, Queued], now: float) -> tuple[str, ...]:
    status, waiting = look.status, look.waiting
    phase = look.problem
    if waiting is not None:
        phase = _waits(queued.get(waiting.job))
    elif status is not None:
        phase = _phase_word(status) + (" (silent)" if is_silent(status, now) else "")
    if status is None:
        job, since = (
            (waiting.job, f"{duration(max(0.0, now - waiting.since))} ago") if waiting is not None else ("", "")
        )
        return (_place(look.run), phase, job, "", "", "", "", since)
    return (
        _place(look.run),
        phase,
        waiting.job if waiting is not None else str(status.job_id),
        f"{status.attempt}.{status.launch}" if status.launched else str(status.attempt),
        "-" if status.step is None else progress.steps(status),
        progress.loss(status).removeprefix("loss ") or "-",
        "-" if status.checkpoint_step is None else str(status.checkpoint_step),
        f"{duration(max(0.0, now - heard_at(status)))} ago",
    )


def _waits(queued: Queued | None) -> str:
    """Say in a column what Slurm says of a job that a run waits for."""
    if queued is None:
        return "waiting"
    if queue.is_over(queued):
        return f"{(queued.state or 'gone').lower()} before it started"
    return (queued.state or "waiting").lower() + (f" ({queued.reason})" if queued.reason else "")


def _place(run: RunDirectory) -> str:
    """Return the run's directory as it can be typed from here."""
    here = os.path.relpath(run.path)
    return here if len(here) < len(str(run.path)) and not here.startswith("..") else str(run.path)


def _phase_word(status: Status) -> str:
    if status.phase != Phase.DONE or status.exit_code is None:
        return status.phase
    words = {0: "finished", 10: "requeued", 11: "cancelled", 27: "stopped"}
    return words.get(status.exit_code, f"ended ({status.exit_code})")


GOES_ON_OR_IS_FINISHED = (None, ExitCode.FINISHED, ExitCode.REQUEUED, ExitCode.SUPERSEDED)
BAR_COLUMNS = 30
LINES_BACK_MAX = 20_000  # two weeks of progress records


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
        help="show the run as a page in a browser, which stays up to date; it prints the URL, and how to open it from "
        "another computer (docs/report.md)",
    )
    where = command.add_mutually_exclusive_group()
    where.add_argument(
        "--port", type=int, metavar="PORT", help="with --web: the port on 127.0.0.1 (default: a free one)"
    )
    where.add_argument(
        "--socket", metavar="PATH", help="with --web: a Unix socket that only this account can open, instead of a port"
    )
    command.set_defaults(execute=execute)


@printing.reading
def execute(arguments: argparse.Namespace) -> int:
    """Print the status of a run."""
    _require_one_way(arguments)
    if arguments.web:
        return _serve(arguments)
    unsaid = arguments.run is None and not (arguments.follow or arguments.json)  # programs get one document
    if arguments.all or (unsaid and not find.is_here(os.environ)):
        found = find.every(os.environ)
        if arguments.all or len(found) > 1:
            return show_list(found, as_json=arguments.json)
    run = find.find(arguments.run, os.environ)
    if arguments.follow:
        from stepkeeper.run_analytics.follow import follow  # noqa: PLC0415 - a supervisor, which knows all commands, stays small

        return follow(run)
    status = status_file.require(run.status)
    waiting = queue.waiting(run, status)
    if status is None and waiting is None:
        raise StepkeeperError(
            f"{run.status}: not there: no supervisor has worked on this run yet, or it could not write",
            ExitCode.NOTHING_FOUND,
        )
    now = time.time()
    job = waiting.job if waiting is not None else None
    if status is not None and is_silent(status, now):
        job = queue.name(status)
    queued = queue.query(job) if job is not None else None
    if status is None:
        assert waiting is not None, "looked at above"
        return show_pending(run, waiting, queued, as_json=arguments.json)
    seen = _computed(run, status, waiting, now)
    if arguments.json:
        printing.say_json({**msgspec.to_builtins(status), **seen, "queue": msgspec.to_builtins(queued)}, indent=2)
    else:
        _show(run, status, seen, queued, waiting, asked_for=arguments.run or "")
    return ExitCode.FINISHED


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
        raise StepkeeperError(wrong, ExitCode.USAGE)


def _serve(arguments: argparse.Namespace) -> int:
    from stepkeeper.run_analytics.web import serve  # noqa: PLC0415 - a supervisor, which knows all commands, stays small

    socket_path = Path(os.path.abspath(arguments.socket)) if arguments.socket is not None else None
    return serve(find.find(arguments.run, os.environ), port=arguments.port or 0, socket_path=socket_path)


def _computed(run: RunDirectory, status: Status, waiting: Waiting | None, now: float) -> dict[str, Any]:
    """Return what `--json` adds to the status document."""
    done = status.phase == Phase.DONE
    directory = _checkpoint(run, status.checkpoint_step)
    newest = rows(run)
    left_s = progress.seconds_left(status, newest)
    works = status.phase == Phase.TRAINING and not is_silent(status, now)
    return {
        "run_directory": str(run.path),
        "done": done,
        "phase_since": _phase_since(run, status),
        "updated_ago_s": round(max(0.0, now - status.updated_at), 3),
        "heard_ago_s": round(max(0.0, now - heard_at(status)), 3),
        "silent": is_silent(status, now),
        "waiting": msgspec.to_builtins(waiting),
        "progress": progress.share(status),
        "pace_s": progress.pace(newest),
        "seconds_left": left_s,
        "done_at": now + left_s if left_s is not None and works else None,
        "exit_meaning": exit_meaning(status.exit_code) if status.exit_code is not None else None,
        "checkpoint_directory": directory,
        "checkpoint_state": reading.condition_of(Path(directory), run) if directory else None,
    }


def _phase_since(run: RunDirectory, status: Status) -> float | None:
    """Return when the phase began, from the end of the journal; None if it does not tell."""
    since: float | None = None
    lines = itertools.islice(journal.read_lines(run.journal, newest_first=True), LINES_BACK_MAX)
    for record, _ in lines:
        if record is None:
            continue
        if (record.attempt, record.phase.value) != (status.attempt, status.phase):
            if since is not None:
                return since
            if record.attempt == status.attempt:
                return None  # the journal is behind the status, or the other way round
            continue  # the last word of a superseded attempt
        since = record.event.at
    return since


def _checkpoint(run: RunDirectory, step: int | None) -> str | None:
    """Return the newest commit's directory, of those with the step's number.

    A framework's checkpoints lie elsewhere; a run directory may have been moved, with its step directories.
    """
    if step is None:
        return None
    lines = itertools.islice(journal.read_lines(run.journal, newest_first=True), LINES_BACK_MAX)
    for record, _ in lines:
        event = record.event if record is not None else None
        directory = getattr(event, "directory", None)
        if isinstance(directory, str) and getattr(event, "step", None) == step:
            inside = run.checkpoints / os.path.basename(directory)
            is_elsewhere = os.path.isabs(directory) and not inside.exists() and os.path.exists(directory)
            return directory if is_elsewhere else str(inside)
    return None


def _show(
    run: RunDirectory,
    status: Status,
    seen: dict[str, Any],
    queued: queue.Queued | None,
    waiting: Waiting | None,
    *,
    asked_for: str,
) -> None:
    now = time.time()
    restarts = f" (restart {status.restart_count})" if status.restart_count else ""
    earlier = f"; job {asked_for} worked on this run before" if _is_earlier_job(asked_for, status, waiting) else ""
    silent = seen["silent"]
    gone = waiting is not None and queued is not None and queue.is_over(queued)
    rows = [("run", str(run.path)), *_phases(status, seen, waiting, now, gone=gone)]
    if queued is not None:
        rows.append(("Slurm says", queue.words(queued, now)))
    launch = f"launch {status.launch}" if status.launched else "no launch yet"
    rows += [
        ("job", f"{status.job_id}{restarts}; attempt {status.attempt}, {launch}{earlier}"),
        ("nodes", f"{len(status.nodes)}: {' '.join(status.nodes)}"),
        *_training(status, seen, now),
        ("last decision", status.why or "none yet"),
        ("updated", _age(status, seen)),
    ]
    if status.suspended_seconds:
        rows.insert(-1, ("suspended", f"{duration(status.suspended_seconds)} of this attempt"))
    printing.say_table(rows)
    if silent:
        printing.say()
        printing.say(
            f"Nobody has written the status for {duration(seen['heard_ago_s'])}: the job is suspended or gone, or its "
            f"storage hangs.  Check it with `squeue -j {status.job_id}`."
        )
    printing.say()
    printing.say(f"events: stepkeeper events {run.path}    logs: stepkeeper logs {run.path}")
    if waiting is not None and queued is not None and not queue.is_over(queued):
        printing.say(f"to stop: stepkeeper stop {run.path}, or scancel {waiting.job}; its checkpoints stay")
    elif seen["done"] and (waiting is not None or status.exit_code not in GOES_ON_OR_IS_FINISHED):
        unsure = queued is not None and queued.error
        printing.say("" if unsure else f"to continue: stepkeeper resume {run.path}")
    elif not seen["done"]:
        printing.say(f"to stop: stepkeeper stop {run.path} (saves first), or scancel {status.job_id}")


def _phases(
    status: Status, seen: dict[str, Any], waiting: Waiting | None, now: float, *, gone: bool
) -> list[tuple[str, str]]:
    """Return what the run does now; where nobody writes, what it did when somebody did."""
    if waiting is not None:
        doing = "ended without job" if gone else "waiting for job"
        rows = [("phase", f"{doing} {waiting.job}, {waited(waiting, now)}")]
        if status.exit_code is not None:
            rows.append(("before", f"{seen['exit_meaning']} (exit code {status.exit_code})"))
        return rows
    phase = status.phase
    if seen["silent"]:
        phase = f"unknown, no update for {duration(seen['heard_ago_s'])}; it was {status.phase}"
    elif seen["phase_since"] is not None:
        since = seen["phase_since"]
        phase += f", for {duration(max(0.0, now - since))} (since {instant(since)})"
    rows = [("phase", phase)]
    if status.waits_for:
        rows.append(("waits for", ", ".join(WAITS_FOR.get(gate, gate) for gate in status.waits_for)))
    if status.exit_code is not None:
        rows.append(("ended", f"{seen['exit_meaning']} (exit code {status.exit_code})"))
    return rows


def _done(status: Status, seen: dict[str, Any], now: float) -> list[tuple[str, str]]:
    """Return how much of the steps is done, and when the rest will be, where their number is known."""
    share = seen["progress"]
    if share is None or status.exit_code == ExitCode.FINISHED:
        return []
    plain = "utf" not in (sys.stdout.encoding or "").lower()
    left = progress.eta(seen["seconds_left"], now, works=seen["done_at"] is not None)
    said = f"{100 * share:.1f} %" + (f", {left}" if left else "")
    return [("done", f"{progress.bar(share, BAR_COLUMNS, plain=plain)}  {said}")]


def _age(status: Status, seen: dict[str, Any]) -> str:
    """Say how old the newest event is, and when the supervisor was heard of last."""
    newest = f"{duration(seen['updated_ago_s'])} ago ({instant(status.updated_at)})"
    if seen["done"] or status.alive_at is None or heard_at(status) == status.updated_at:
        return newest
    return f"{newest}; the supervisor wrote {duration(seen['heard_ago_s'])} ago"


def _is_earlier_job(asked_for: str, status: Status, waiting: Waiting | None) -> bool:
    """Tell whether a run was asked for by a job of its chain that another one has followed."""
    newest = waiting.job if waiting is not None else str(status.job_id)
    return asked_for.isdigit() and not os.path.isdir(asked_for) and asked_for != newest


def _training(status: Status, seen: dict[str, Any], now: float) -> list[tuple[str, str]]:
    """Return the rows that only the trainer library can fill, or why they are missing."""
    if status.library is False and status.checkpoint_step is None:
        return [("library", status_file.NO_LIBRARY)]
    return [
        ("step", _progress(status, seen)),
        *_done(status, seen, now),
        ("checkpoint", _newest(status, seen)),
        ("resumed from", status.resumed_from or "no step directory: this attempt started from the beginning"),
    ]


def _progress(status: Status, seen: dict[str, Any]) -> str:
    if status.step is None:
        return "none reported yet"
    parts = [progress.steps(status), progress.loss(status)]
    if status.tokens:
        parts.append(f"{status.tokens:,} tokens")
    a_step = seen["pace_s"] or status.step_seconds
    if a_step is not None:
        parts.append(f"{duration(a_step)} a step")
    return ", ".join(part for part in parts if part)


def _newest(status: Status, seen: dict[str, Any]) -> str:
    held = held_in_memory(status)
    besides = f"; {held}" if held else ""
    if status.checkpoint_step is None:
        return f"none yet{besides}"
    where = seen["checkpoint_directory"]
    there = f" ({os.path.basename(where)}): {seen['checkpoint_state']}" if where else ""
    return f"step {status.checkpoint_step}{there}{besides}"
