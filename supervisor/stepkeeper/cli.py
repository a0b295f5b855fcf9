"""The command `stepkeeper`: parse, run one command, turn errors into one line and an exit code."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import NoReturn

from stepkeeper import __version__
from stepkeeper.commands import COMMANDS, load
from stepkeeper.core.exits import ExitCode
from stepkeeper.errors import StepkeeperError


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, and how to learn more."""

    def error(self, message: str) -> NoReturn:
        """Exit with the code of a usage error."""
        self.exit(int(ExitCode.USAGE), f"stepkeeper: {message}; see `{self.prog} --help`\n")


def parser(names: Sequence[str] = COMMANDS) -> argparse.ArgumentParser:
    """Return the parser of commands: of all, where it is not known which one will be called."""
    top = Parser(
        prog="stepkeeper",
        description="Keeps a distributed PyTorch training job on Slurm moving forward.",
        allow_abbrev=False,
    )
    top.add_argument("--version", action="version", version=f"stepkeeper {__version__}")
    subcommands = top.add_subparsers(
        dest="command", metavar="COMMAND", required=True, parser_class=Parser, title="commands"
    )
    for name in names:
        load(name).add(subcommands)
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    words = sys.argv[1:] if argv is None else list(argv)
    if not words:
        parser().print_help(sys.stderr)
        return int(ExitCode.USAGE)
    names = words[:1] if words[:1] and words[0] in COMMANDS else COMMANDS
    try:
        arguments = parser(names).parse_args(words)
        return int(arguments.execute(arguments))
    except StepkeeperError as error:
        print(f"stepkeeper: {error}", file=sys.stderr)  # noqa: T201 - a command's own words
        return int(error.code)
    except BrokenPipeError:
        sys.stderr.close()  # the reader of our output left: `stepkeeper events RUN | head`
        return 0
    except KeyboardInterrupt:
        return 130
