"""`stepkeeper save RUN`: a checkpoint now."""

from __future__ import annotations

import argparse

from stepkeeper.cli import requests


def add(subcommands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    command = subcommands.add_parser(
        "save",
        help="have a run save a checkpoint now, and go on",
        description="Have a run save a checkpoint at the next step, and go on.  Waits until it is committed.",
        allow_abbrev=False,
    )
    requests.declare(command, "save")
