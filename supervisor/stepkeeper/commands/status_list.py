"""`stepkeeper status` without RUN: all runs that there are, one a line."""

from __future__ import annotations

import os
import time
from typing import Any

import msgspec

from stepkeeper import printing
from stepkeeper.core.exits import ExitCode
from stepkeeper.core.state import Phase
from stepkeeper.printing import duration
from stepkeeper.seeing import progress, queue
from stepkeeper.seeing.queue import Queued, Waiting
from stepkeeper.store import status as status_file
from stepkeeper.store.rundir import RunDirectory
from stepkeeper.store.status import Status, heard_at, is_silent

RUNS_MAX = 100  # lines of the list of all runs
_HEADINGS = ("RUN", "PHASE", "JOB", "ATTEMPT", "STEP", "LOSS", "SAVED", "UPDATED")


class _Look(msgspec.Struct, frozen=True):
    run: RunDirectory
    status: Status | None
    waiting: Waiting | None
    problem: str = ""


def show(runs: list[RunDirectory], *, as_json: bool) -> int:
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
