"""`stepkeeper completion bash`: completion of commands and options, made from the parser itself."""

from __future__ import annotations

import argparse
import sys

from stepkeeper.cli import printing
from stepkeeper.core.exits import ExitCode

SHELLS = ("bash", "zsh", "tcsh")


def add(subcommands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    command = subcommands.add_parser(
        "completion",
        help="print completion for a shell",
        description="Print completion of commands and options.  For bash: "
        "stepkeeper completion bash > ~/.local/share/bash-completion/completions/stepkeeper",
        allow_abbrev=False,
    )
    command.add_argument("shell", choices=SHELLS, metavar="|".join(SHELLS))
    command.set_defaults(execute=execute)


@printing.reading
def execute(arguments: argparse.Namespace) -> int:
    """Print the script."""
    import shtab  # noqa: PLC0415 - no other command needs it

    from stepkeeper.cli.main import parser  # noqa: PLC0415 - it has this command

    sys.stdout.write(shtab.complete(parser(), shell=arguments.shell))
    return ExitCode.FINISHED
