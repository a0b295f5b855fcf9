"""`stepkeeper logs RUN`: what the ranks of a launch printed."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from stepkeeper import printing
from stepkeeper.commands import logs_failed, logs_follow
from stepkeeper.commands.logs_lines import SRUN, files_of, launches, of_rank, said_in, show
from stepkeeper.core.exits import ExitCode
from stepkeeper.errors import StepkeeperError
from stepkeeper.store import find
from stepkeeper.store.logs import FAILED_NAME
from stepkeeper.store.rundir import RunDirectory


def add(subcommands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    command = subcommands.add_parser(
        "logs",
        help="show what the ranks printed",
        description="Show what the ranks of a launch printed: the newest launch, if none is named.",
        allow_abbrev=False,
    )
    command.add_argument("run", nargs="?", metavar="RUN", help="run directory or job id (default: the run here)")
    command.add_argument("--attempt", type=int, metavar="N", help="of this attempt (default: the newest)")
    command.add_argument("--launch", type=int, metavar="N", help="of this launch (default: the newest)")
    command.add_argument("--node", metavar="NAME", help=f"of this node only (`{SRUN}`: what srun itself said)")
    command.add_argument("--rank", type=int, metavar="R", help="of this rank only")
    command.add_argument(
        "--failed",
        action="store_true",
        help="what the rank that failed first printed last, in the newest launch that failed",
    )
    command.add_argument(
        "-f", "--follow", action="store_true", help="go on as lines come, over relaunches, until the run ends"
    )
    command.add_argument("--tail", type=int, metavar="N", help="only the newest N lines of each node")
    command.add_argument("--json", action="store_true", help="JSON lines with node, rank, line")
    command.set_defaults(execute=execute)


@printing.reading
def execute(arguments: argparse.Namespace) -> int:
    """Print the logs of one launch, node by node."""
    if arguments.tail is not None and arguments.tail < 1:
        raise StepkeeperError("--tail is at least 1", ExitCode.USAGE)
    if arguments.failed and arguments.follow:
        raise StepkeeperError("--failed shows what is over, --follow what goes on: choose one", ExitCode.USAGE)
    run = find.find(arguments.run, os.environ)
    if arguments.follow:
        return logs_follow.follow(run, arguments)
    directory = _launch(run, arguments.attempt, arguments.launch, failed=arguments.failed)
    if arguments.failed:
        return logs_failed.show_failed(run, directory, arguments)
    rank = arguments.rank
    files = files_of(directory, arguments.node)
    several = len(files) > 1
    count = 0
    for node, path in files.items():
        for said in said_in(run.path, path, of_rank(rank), arguments.tail):
            count += 1
            show(said, node if several else None, node, as_json=arguments.json)
    if rank is not None and not count:
        raise StepkeeperError(f"{directory}: no line of rank {rank} in {', '.join(files)}", ExitCode.NOTHING_FOUND)
    return ExitCode.FINISHED


def _launch(run: RunDirectory, attempt: int | None, launch: int | None, *, failed: bool) -> Path:
    """Return the logs of one launch; the newest of what was not named."""
    root = run.path / "logs"
    there_are = launches(run)
    chosen = [
        key
        for key, path in there_are.items()
        if (attempt is None or key[0] == attempt)
        and (launch is None or key[1] == launch)
        and (not failed or (path / FAILED_NAME).exists())
    ]
    if chosen:
        return there_are[max(chosen)]
    if failed and there_are:
        raise StepkeeperError(
            f"{root}: no launch of {'that kind' if attempt is not None or launch is not None else 'this run'} failed",
            ExitCode.NOTHING_FOUND,
        )
    if not there_are:
        raise StepkeeperError(f"{root}: no launch has written logs yet", ExitCode.NOTHING_FOUND)
    there = ", ".join(f"{a}.{b}" for a, b in sorted(there_are)[-10:])
    asked = f"{'*' if attempt is None else attempt}.{'*' if launch is None else launch}"
    raise StepkeeperError(
        f"{root}: no logs of attempt.launch {asked}; there are those of {there}", ExitCode.NOTHING_FOUND
    )
