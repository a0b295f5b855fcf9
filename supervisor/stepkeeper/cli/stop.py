"""`stepkeeper stop RUN`: save, and end."""

from __future__ import annotations

import argparse

from stepkeeper.cli import requests


def add(subcommands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    command = subcommands.add_parser(
        "stop",
        help="have a run save a checkpoint, and end",
        description="Have a run save a checkpoint at the next step, and end; it is not requeued.  A job that waits in "
        "the queue is cancelled: nothing runs that could save, and checkpoints of earlier attempts stay.  `stepkeeper "
        "resume` submits the run again, and it goes on.  (`scancel JOB` ends it without a checkpoint.)",
        allow_abbrev=False,
    )
    requests.declare(command, "stop")
