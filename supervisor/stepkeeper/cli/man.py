"""`stepkeeper man`: the manual page, made from the parser itself."""

from __future__ import annotations

import argparse
import os
import sys

from stepkeeper.cli import printing
from stepkeeper.core.exits import ExitCode
from stepkeeper.errors import StepkeeperError

COLUMNS = "80"  # of the usage lines, which argparse breaks for the terminal at hand


def add(subcommands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    command = subcommands.add_parser(
        "man",
        help="print the manual page",
        description="Print the manual page.  To install it: "
        "stepkeeper man > ~/.local/share/man/man1/stepkeeper.1.  Needs the extra `man`.",
        allow_abbrev=False,
    )
    command.set_defaults(execute=execute)


@printing.reading
def execute(_arguments: argparse.Namespace) -> int:
    """Print the page in the language of man."""
    try:
        from argparse_manpage.manpage import Manpage  # noqa: PLC0415 - for those who have it
    except ImportError as error:
        raise StepkeeperError(
            "the manual page is made by a library that is not installed: pip install 'stepkeeper[man]'", ExitCode.USAGE
        ) from error
    from stepkeeper.cli.main import parser  # noqa: PLC0415 - it has this command

    os.environ["COLUMNS"] = COLUMNS
    sys.stdout.write(str(Manpage(parser(), format="pretty")))
    return ExitCode.FINISHED
