"""What `stepkeeper report` does: read the run, write the page.  Imported when it is asked for."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from stepkeeper import __version__
from stepkeeper.cli import printing
from stepkeeper.core.exits import ExitCode
from stepkeeper.errors import StepkeeperError
from stepkeeper.run_analytics import reading
from stepkeeper.run_analytics.model import SECOND, Use, micro
from stepkeeper.run_analytics.reading import Started
from stepkeeper.run_analytics.report import page as report_page
from stepkeeper.run_analytics.report.page import About, page
from stepkeeper.run_analytics.timeline import RunState, Timeline
from stepkeeper.run_store import find
from stepkeeper_trainer.formats.durable import write_atomically

DEFAULT_NAME = "report.html"


def write(arguments: argparse.Namespace) -> int:
    """Write the page, or print the figures.

    Raises:
        StepkeeperError: no such run, or nothing has happened in it yet.
        OSError: a file cannot be read or written.
    """
    run = find.find(arguments.run, os.environ)
    now = time.time()
    seen = reading.see(run, now=now)
    if seen.run_state is RunState.EMPTY:
        raise StepkeeperError(
            f"{run.journal}: tells nothing: no supervisor has worked on this run yet", ExitCode.NOTHING_FOUND
        )
    ran = reading.read(run, (attempt.number for attempt in seen.attempts))
    if arguments.json:
        printing.say_json(document(seen, str(run.path), ran), indent=2)
        return ExitCode.FINISHED
    about = About(name=run.path.name, path=str(run.path), made_at=micro(now), version=__version__, started=ran)
    data = page(seen, about).encode("utf-8", errors="replace")
    if arguments.output == "-":
        sys.stdout.buffer.write(data)
        return ExitCode.FINISHED
    target = Path(arguments.output or DEFAULT_NAME)
    write_atomically(target, data, mode=0o644)
    ettr = seen.accounts.ettr
    share = "" if ettr is None else f"; {ettr:.1%} of the time became progress"
    printing.say(f"written: {target} ({printing.size(len(data))}){share}")
    return ExitCode.FINISHED


def document(seen: Timeline, path: str = "", ran: Sequence[Started] = ()) -> dict[str, Any]:
    """Return the figures for programs.  Times are seconds, instants Unix seconds."""
    accounts = seen.accounts
    return {
        "standing": seen.run_state.value,
        "began": seen.began / SECOND,
        "until": seen.until / SECOND,
        "step": seen.step,
        "tokens": seen.tokens,
        "loss": seen.loss,
        "loss_not_finite": seen.loss_not_finite,
        "learning_rate": seen.rate,
        "exit_code": seen.exit_code,
        "why": seen.why or None,
        "how_to_go_on": msgspec.to_builtins(report_page.advice(seen, path)),
        "started": [{**msgspec.to_builtins(each), "code": each.code} for each in ran],
        "steps_lost": seen.steps_lost,
        "ettr": accounts.ettr,
        "goodput": accounts.goodput,
        "wall_s": {use.value: accounts.wall[use] / SECOND for use in Use},
        "wall_total_s": accounts.wall_total / SECOND,
        "node_s": {use.value: accounts.node_time[use] / SECOND for use in Use},
        "gpus_per_node": seen.gpus_per_node or None,
        "node_total_s": accounts.node_total / SECOND,
        "launches": [
            {
                "attempt": launch.attempt,
                "launch": launch.number,
                "began": launch.began / SECOND,
                "ended": None if launch.ended is None else launch.ended / SECOND,
                "nodes": list(launch.nodes),
                "resumed_step": launch.resumed_step,
                "last_step": launch.last_step,
                "ending": launch.ending.value,
                "why": launch.why,
                "reason": launch.reason,
                "cause": launch.cause or None,
                "decided": launch.decided,
            }
            for launch in seen.launches()
        ],
        "checkpoints": [
            {**msgspec.to_builtins(each), "at": None if each.at is None else each.at / SECOND}
            for each in seen.checkpoints
        ],
        "incidents": [{**msgspec.to_builtins(each), "at": each.at / SECOND} for each in seen.incidents],
    }
