"""`stepkeeper report RUN -o report.html`: what happened in a run, as one page that needs nothing else."""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

from stepkeeper import __version__, printing
from stepkeeper.errors import NotFoundError
from stepkeeper.run_analytics import reading
from stepkeeper.run_analytics.model import micro
from stepkeeper.run_analytics.timeline import RunState
from stepkeeper.run_store import find
from stepkeeper_trainer.formats.durable import write_atomically

DEFAULT_NAME = "report.html"


def add(subcommands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    command = subcommands.add_parser(
        "report",
        help="write what happened in a run, and where its time went, as one HTML page",
        description="Write what happened in a run as one HTML page without any external part (docs/report.md).  It "
        "shows attempts, launches and nodes over time, where the hours went, ETTR and goodput.  It also shows the loss "
        "across all resumes, step directories, failures and incidents.",
    )
    command.add_argument("run", metavar="RUN", nargs="?", help="run directory or job id (default: as `status`)")
    command.add_argument("-o", "--output", metavar="FILE", help="where to write (default: report.html; -: stdout)")
    command.add_argument("--json", action="store_true", help="the figures as one JSON document instead of a page")
    command.set_defaults(execute=execute)


def execute(arguments: argparse.Namespace) -> None:
    """Write the page, or print the figures."""
    from stepkeeper.run_analytics.report.page import About, for_programs, page  # noqa: PLC0415 - for this command only

    run = find.find(arguments.run, os.environ)
    now = time.time()
    seen = reading.see(run, now=now)
    if seen.run_state is RunState.EMPTY:
        raise NotFoundError(f"{run.journal}: tells nothing: no supervisor has worked on this run yet")
    ran = reading.read(run, (attempt.number for attempt in seen.attempts))
    if arguments.json:
        printing.say_json(for_programs(seen, str(run.path), ran))
        return
    about = About(name=run.path.name, path=str(run.path), made_at=micro(now), version=__version__, started=ran)
    data = page(seen, about).encode("utf-8", errors="replace")
    if arguments.output == "-":
        sys.stdout.buffer.write(data)
        return
    target = Path(arguments.output or DEFAULT_NAME)
    write_atomically(target, data, mode=0o644)
    ettr = seen.accounts.ettr
    share = "" if ettr is None else f"; {ettr:.1%} of the time became progress"
    printing.say(f"written: {target} ({printing.size(len(data))}){share}")
