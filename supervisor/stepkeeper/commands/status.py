"""`stepkeeper status [RUN]`: where a run stands, on one screen."""

from __future__ import annotations

import argparse
import itertools
import os
import time
from typing import Any

import msgspec

from stepkeeper import printing
from stepkeeper.core.exits import ExitCode
from stepkeeper.core.state import Phase
from stepkeeper.errors import StepkeeperError
from stepkeeper.printing import duration, instant
from stepkeeper.store import find, journal
from stepkeeper.store import status as status_file
from stepkeeper.store.rundir import RunDirectory
from stepkeeper.store.status import Status

SILENT_S = 120.0  # a supervisor hears of each step; what says nothing for longer is pointed out
SILENT_STEPS = 10
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
        help="run directory or job id (default: the run here, STEPKEEPER_RUN_DIR, the newest in runs/)",
    )
    command.add_argument("--json", action="store_true", help="one JSON document")
    command.set_defaults(execute=execute)


@printing.reading
def execute(arguments: argparse.Namespace) -> int:
    """Print the status of a run."""
    run = find.find(arguments.run, os.environ)
    status = _read(run)
    seen = _computed(run, status, time.time())
    if arguments.json:
        printing.say_json({**msgspec.to_builtins(status), **seen}, indent=2)
    else:
        _show(run, status, seen)
    return ExitCode.FINISHED


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
    patience_s = max(SILENT_S, SILENT_STEPS * (status.step_seconds or 0.0))
    return {
        "run_directory": str(run.path),
        "done": done,
        "phase_since": _phase_since(run, status),
        "updated_ago_s": round(age_s, 3),
        "silent": not done and age_s > patience_s,
        "exit_meaning": _meaning(status.exit_code),
        "checkpoint_directory": _checkpoint(run, status.checkpoint_step),
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


def _show(run: RunDirectory, status: Status, seen: dict[str, Any]) -> None:
    now = time.time()
    restarts = f" (restart {status.restart_count})" if status.restart_count else ""
    rows = [("run", str(run.path))]
    phase = status.phase
    if seen["phase_since"] is not None:
        since = seen["phase_since"]
        phase += f", for {duration(max(0.0, now - since))} (since {instant(since)})"
    rows.append(("phase", phase))
    if status.exit_code is not None:
        rows.append(("ended", f"{seen['exit_meaning']} (exit code {status.exit_code})"))
    rows += [
        ("job", f"{status.job_id}{restarts}; attempt {status.attempt}, launch {status.launch}"),
        ("nodes", f"{len(status.nodes)}: {' '.join(status.nodes)}"),
        ("step", _progress(status)),
        ("checkpoint", _newest(status, seen)),
        ("resumed from", status.resumed_from or "nothing: this attempt started from the beginning"),
        ("last decision", status.why or "none yet"),
        ("updated", f"{duration(seen['updated_ago_s'])} ago ({instant(status.updated_at)})"),
    ]
    printing.say_table(rows)
    if seen["silent"]:
        printing.say()
        printing.say(
            f"No word from the supervisor for {duration(seen['updated_ago_s'])}: a step may take that long, "
            f"or the job is gone; `squeue -j {status.job_id}` tells."
        )
    printing.say()
    printing.say(f"events: stepkeeper events {run.path}    logs: stepkeeper logs {run.path}")
    if not seen["done"]:
        printing.say(f"to stop: scancel {status.job_id}")


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
    return f"step {status.checkpoint_step}" + (f" ({os.path.basename(where)})" if where else "")
