"""`stepkeeper status [RUN]`: where a run stands, on one screen; without RUN, all runs that there are."""

from __future__ import annotations

import argparse
import itertools
import os
import time
from pathlib import Path
from typing import Any

import msgspec

from stepkeeper import printing
from stepkeeper.core.exits import ExitCode
from stepkeeper.core.state import Phase
from stepkeeper.errors import StepkeeperError
from stepkeeper.printing import duration, instant
from stepkeeper.seeing import queue, reading
from stepkeeper.store import find, journal
from stepkeeper.store import status as status_file
from stepkeeper.store.rundir import RunDirectory
from stepkeeper.store.status import Status

SILENT_S = 120.0  # a supervisor hears of each step; what says nothing for longer is pointed out
SILENT_STEPS = 10
RUNS_MAX = 100  # lines of the list of all runs
GOES_ON_OR_IS_FINISHED = (None, ExitCode.FINISHED, ExitCode.REQUEUED, ExitCode.SUPERSEDED)
LINES_BACK_MAX = 20_000  # two weeks of progress records


def add(subcommands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    command = subcommands.add_parser(
        "status", help="show where a run stands", description="Show where a run stands.", allow_abbrev=False
    )
    command.add_argument(
        "run",
        nargs="?",
        metavar="RUN",
        help="run directory or job id (default: the run here, STEPKEEPER_RUN_DIR; else all runs, one a line)",
    )
    command.add_argument("--all", action="store_true", help="all runs below runs/, and those that you have started")
    command.add_argument("--follow", "-f", action="store_true", help="stay, and show what changes, until it is over")
    command.add_argument("--json", action="store_true", help="one JSON document")
    command.set_defaults(execute=execute)


@printing.reading
def execute(arguments: argparse.Namespace) -> int:
    """Print the status of a run."""
    if arguments.run is not None and arguments.all:
        raise StepkeeperError("--all goes without RUN", ExitCode.USAGE)
    if arguments.follow and (arguments.json or arguments.all):
        raise StepkeeperError("--follow shows one run, for people: it goes without --json and --all", ExitCode.USAGE)
    unsaid = arguments.run is None and not (arguments.follow or arguments.json)  # programs get one document
    if arguments.all or (unsaid and not find.is_here(os.environ)):
        found = find.every(os.environ)
        if arguments.all or len(found) > 1:
            return _show_all(found, as_json=arguments.json)
    run = find.find(arguments.run, os.environ)
    if arguments.follow:
        from stepkeeper.seeing.follow import follow  # noqa: PLC0415 - a supervisor, which knows all commands, stays small

        return follow(run)
    status = _read(run)
    seen = _computed(run, status, time.time())
    waits = seen["silent"] or status.exit_code == ExitCode.REQUEUED
    queued = queue.ask(run, status) if waits else None
    if arguments.json:
        printing.say_json({**msgspec.to_builtins(status), **seen, "queue": msgspec.to_builtins(queued)}, indent=2)
    else:
        _show(run, status, seen, queued, asked_for=arguments.run or "")
    return ExitCode.FINISHED


def _show_all(runs: list[RunDirectory], *, as_json: bool) -> int:
    """Print one line a run, the newest first; what cannot be read is said in its line."""
    now = time.time()
    documents: list[dict[str, Any]] = []
    rows = [("RUN", "PHASE", "JOB", "ATTEMPT", "STEP", "LOSS", "SAVED", "UPDATED")]
    for run in runs[:RUNS_MAX]:
        try:
            status = status_file.read(run.status)
            problem = None if status is not None else "no supervisor yet"
        except (OSError, msgspec.MsgspecError) as error:
            status, problem = None, f"its status cannot be read: {getattr(error, 'strerror', None) or error}"
        if status is None:
            documents.append({"run_directory": str(run.path), "problem": problem})
            rows.append((_place(run), problem or "", "", "", "", "", "", ""))
            continue
        silent = _silent(status, now)
        documents.append({**msgspec.to_builtins(status), "run_directory": str(run.path), "silent": silent})
        rows.append(
            (
                _place(run),
                _phase_word(status) + (" (silent)" if silent else ""),
                str(status.job_id),
                f"{status.attempt}.{status.launch}",
                "-" if status.step is None else str(status.step),
                "-" if status.loss is None else f"{status.loss:.5g}",
                "-" if status.checkpoint_step is None else str(status.checkpoint_step),
                f"{duration(max(0.0, now - status.updated_at))} ago",
            )
        )
    if as_json:
        printing.say_json(documents, indent=2)
    elif runs:
        printing.say_table(rows, right=frozenset((2, 3, 4, 5, 6)))
        if len(runs) > RUNS_MAX:
            printing.say(f"and {len(runs) - RUNS_MAX} older ones")
    else:
        printing.say("no runs below runs/ here, and none that this account has started")
    return ExitCode.FINISHED


def _place(run: RunDirectory) -> str:
    """Return the run's directory as it can be typed from here."""
    here = os.path.relpath(run.path)
    return here if len(here) < len(str(run.path)) and not here.startswith("..") else str(run.path)


def _phase_word(status: Status) -> str:
    if status.phase != Phase.DONE or status.exit_code is None:
        return status.phase
    words = {0: "finished", 10: "requeued", 11: "cancelled", 27: "stopped"}
    return words.get(status.exit_code, f"ended ({status.exit_code})")


def _silent(status: Status, now: float) -> bool:
    patience_s = max(SILENT_S, SILENT_STEPS * (status.step_seconds or 0.0))
    return status.phase != Phase.DONE and now - status.updated_at > patience_s


def _read(run: RunDirectory) -> Status:
    try:
        status = status_file.read(run.status)
    except msgspec.MsgspecError as error:
        raise StepkeeperError(
            f"{run.status}: not a status: {error}; the journal tells more: `stepkeeper events {run.path}`",
            ExitCode.RUN_DIRECTORY,
        ) from error
    if status is None:
        raise StepkeeperError(
            f"{run.status}: not there: no supervisor has worked on this run yet, or it could not write",
            ExitCode.NOTHING_FOUND,
        )
    return status


def _computed(run: RunDirectory, status: Status, now: float) -> dict[str, Any]:
    """Return what `--json` adds to the status document."""
    done = status.phase == Phase.DONE
    age_s = max(0.0, now - status.updated_at)
    newest = _checkpoint(run, status.checkpoint_step)
    return {
        "run_directory": str(run.path),
        "done": done,
        "phase_since": _phase_since(run, status),
        "updated_ago_s": round(age_s, 3),
        "silent": _silent(status, now),
        "exit_meaning": _meaning(status.exit_code),
        "checkpoint_directory": newest,
        "checkpoint_state": reading.condition_of(Path(newest), run) if newest else None,
    }


def _meaning(code: int | None) -> str | None:
    if code is None:
        return None
    known = (each.meaning for each in ExitCode if each.value == code)
    return next(known, "a code that this Stepkeeper does not know")


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
    """Return the newest commit's directory, of those with the step's number."""
    if step is None:
        return None
    lines = itertools.islice(journal.read_lines(run.journal, newest_first=True), LINES_BACK_MAX)
    for record, _ in lines:
        event = record.event if record is not None else None
        directory = getattr(event, "directory", None)
        if isinstance(directory, str) and getattr(event, "step", None) == step:
            return str(run.checkpoints / os.path.basename(directory))
    return None


def _show(
    run: RunDirectory, status: Status, seen: dict[str, Any], queued: queue.Queued | None, *, asked_for: str
) -> None:
    now = time.time()
    restarts = f" (restart {status.restart_count})" if status.restart_count else ""
    earlier = f"; job {asked_for} worked on this run before" if _is_earlier_job(asked_for, status) else ""
    rows = [("run", str(run.path))]
    phase = status.phase
    if seen["phase_since"] is not None:
        since = seen["phase_since"]
        phase += f", for {duration(max(0.0, now - since))} (since {instant(since)})"
    rows.append(("phase", phase))
    if status.exit_code is not None:
        rows.append(("ended", f"{seen['exit_meaning']} (exit code {status.exit_code})"))
    if queued is not None:
        rows.append(("Slurm says", queue.words(queued, now)))
    rows += [
        ("job", f"{status.job_id}{restarts}; attempt {status.attempt}, launch {status.launch}{earlier}"),
        ("nodes", f"{len(status.nodes)}: {' '.join(status.nodes)}"),
        ("step", _progress(status)),
        ("checkpoint", _newest(status, seen)),
        ("resumed from", status.resumed_from or "nothing: this attempt started from the beginning"),
        ("last decision", status.why or "none yet"),
        ("updated", f"{duration(seen['updated_ago_s'])} ago ({instant(status.updated_at)})"),
    ]
    if status.suspended_seconds:
        rows.insert(-1, ("suspended", f"{duration(status.suspended_seconds)} of this attempt"))
    printing.say_table(rows)
    if seen["silent"]:
        printing.say()
        printing.say(
            f"No word from the supervisor for {duration(seen['updated_ago_s'])}: a step may take that long, "
            f"or the job is suspended or gone; `squeue -j {status.job_id}` tells."
        )
    printing.say()
    printing.say(f"events: stepkeeper events {run.path}    logs: stepkeeper logs {run.path}")
    ended = queued is not None and queue.is_over(queued)
    if seen["done"] and (status.exit_code not in GOES_ON_OR_IS_FINISHED or ended):
        printing.say(f"to go on: submit it again with --run-dir {run.path}, or STEPKEEPER_RUN_DIR={run.path}")
    if not seen["done"]:
        printing.say(f"to stop: stepkeeper stop {run.path} (saves first), or scancel {status.job_id}")


def _is_earlier_job(asked_for: str, status: Status) -> bool:
    """Tell whether a run was asked for by a job of its chain that another one has followed."""
    return asked_for.isdigit() and not os.path.isdir(asked_for) and asked_for != str(status.job_id)


def _progress(status: Status) -> str:
    if status.step is None:
        return "none completed that the supervisor heard of"
    parts = [str(status.step)]
    if status.loss is not None:
        parts.append(f"loss {status.loss:.6g}")
    if status.tokens is not None:
        parts.append(f"{status.tokens:,} tokens")
    if status.step_seconds is not None:
        parts.append(f"{duration(status.step_seconds)} a step")
    return ", ".join(parts)


def _newest(status: Status, seen: dict[str, Any]) -> str:
    if status.checkpoint_step is None:
        return "none yet"
    where = seen["checkpoint_directory"]
    there = f" ({os.path.basename(where)}): {seen['checkpoint_state']}" if where else ""
    return f"step {status.checkpoint_step}{there}"
