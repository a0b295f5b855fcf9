"""`stepkeeper report RUN -o report.html`: what happened in a run, as one page that needs nothing else."""

from __future__ import annotations

import argparse

from stepkeeper.cli import printing


def add(subcommands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    command = subcommands.add_parser(
        "report",
        help="what happened in a run, and where its time went: one HTML page",
        description="Write what happened in a run as one HTML page without any external part: attempts, launches and "
        "nodes over time, where the hours went, ETTR and goodput, the loss across all resumes, step directories, "
        "failures and incidents (docs/report.md).",
        allow_abbrev=False,
    )
    command.add_argument("run", metavar="RUN", nargs="?", help="run directory or job id (default: as `status`)")
    command.add_argument("-o", "--output", metavar="FILE", help="where to write (default: report.html; -: stdout)")
    command.add_argument("--json", action="store_true", help="the figures as one JSON document instead of a page")
    command.set_defaults(execute=execute)


@printing.reading
def execute(arguments: argparse.Namespace) -> int:
    """Write the page."""
    from stepkeeper.run_analytics.report.command import write  # noqa: PLC0415 - a supervisor, which knows all commands, stays small

    return write(arguments)
