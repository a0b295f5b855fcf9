"""The command `stepkeeper`: parse, run one command, turn errors into one line and an exit code."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NoReturn

from stepkeeper import __version__, printing
from stepkeeper.cli import COMMANDS, load
from stepkeeper.core.exits import ExitCode
from stepkeeper.errors import StepkeeperError, UsageError


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, and how to learn more.  Options are written in full, in all commands."""

    def __init__(self, **known: Any) -> None:
        super().__init__(allow_abbrev=False, **known)

    def error(self, message: str) -> NoReturn:
        """Exit with the code of a usage error."""
        self.exit(int(ExitCode.USAGE), f"stepkeeper: {message}; see `{self.prog} --help`\n")

    def called(self, words: Sequence[str]) -> Parser:
        """Return the parser of the command that words call, such as that of `checkpoints ls`."""
        for action in self._actions:
            if words and isinstance(action.choices, Mapping) and words[0] in action.choices:
                below: Parser = action.choices[words[0]]
                return below.called(words[1:])
        return self

    def refuse(self, word: str) -> NoReturn:
        """Exit because of a word that is not known, and name the option that was meant."""
        name = word.partition("=")[0]
        what = "option" if name.startswith("-") else "argument"
        self.error(f"unknown {what} {name}{_nearest(name, self._option_string_actions)}")


def parser(names: Sequence[str] = COMMANDS) -> Parser:
    """Return the parser of commands: of all, where it is not known which one will be called."""
    top = Parser(
        prog="stepkeeper",
        description="Keeps PyTorch training on Slurm alive through preemptions, time limits, dead ranks "
        "and lost nodes.",
        epilog="On a new cluster: `stepkeeper doctor`, then `stepkeeper selftest -p PARTITION -N 2`, then "
        "`stepkeeper submit -N 2 --gpus-per-node 8 -- python train.py`.",
    )
    top.add_argument("--version", action="version", version=f"stepkeeper {__version__}")
    subcommands = top.add_subparsers(
        dest="command", metavar="COMMAND", required=True, parser_class=Parser, title="commands"
    )
    for module in dict.fromkeys(map(load, names)):
        module.add(subcommands)
    return top


def _nearest(word: str, known: Collection[str]) -> str:
    import difflib  # noqa: PLC0415 - for a mistyped word only

    found = difflib.get_close_matches(word, known, n=1)
    return f"; did you mean {found[0]}?" if found else ""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    words = sys.argv[1:] if argv is None else list(argv)
    if not words:
        parser().print_help(sys.stderr)
        return int(ExitCode.USAGE)
    if words[0] not in COMMANDS and not words[0].startswith("-"):
        parser().error(f"no command `{words[0]}`{_nearest(words[0], COMMANDS)}")
    top = parser(words[:1] if words[0] in COMMANDS else COMMANDS)
    arguments = None
    try:
        arguments, unknown = top.parse_known_args(words)
        if unknown:
            top.called(words).refuse(unknown[0])
        if getattr(arguments, "is_service", False):
            return int(arguments.execute(arguments))
        return printing.safely(arguments.execute, arguments)
    except StepkeeperError as error:
        if error.code is ExitCode.NOTHING_FOUND and arguments is not None:
            from stepkeeper.cli import status  # noqa: PLC0415 - a supervisor stays small

            if status.answers(arguments):
                return int(ExitCode.FINISHED)
        print(f"stepkeeper: {error}", file=sys.stderr)  # noqa: T201 - a command's own words
        return int(error.code)
    except KeyboardInterrupt:
        return 130


# `stepkeeper completion bash`, `stepkeeper man`: completion and the manual page, made from the parser itself.

COLUMNS = "80"  # of the usage lines, which argparse breaks for the terminal at hand
SHELLS = ("bash", "zsh", "tcsh")


def add(subcommands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare both commands."""
    command = subcommands.add_parser(
        "completion",
        help="print completion for a shell",
        description="Print completion of commands and options.  For bash: "
        "stepkeeper completion bash > ~/.local/share/bash-completion/completions/stepkeeper",
    )
    command.add_argument("shell", choices=SHELLS, metavar="|".join(SHELLS))
    command.set_defaults(execute=complete)
    command = subcommands.add_parser(
        "man",
        help="print the manual page",
        description="Print the manual page.  To install it: "
        "stepkeeper man > ~/.local/share/man/man1/stepkeeper.1.  Needs the extra `man`.",
    )
    command.set_defaults(execute=print_manual)


def complete(arguments: argparse.Namespace) -> None:
    """Print the script."""
    import shtab  # noqa: PLC0415 - no other command needs it

    sys.stdout.write(shtab.complete(parser(), shell=arguments.shell))


def print_manual(_arguments: argparse.Namespace) -> None:
    """Print the page in the language of man."""
    try:
        from argparse_manpage.manpage import Manpage  # noqa: PLC0415 - for those who have it
    except ImportError as error:
        raise UsageError(
            "the manual page is made by a library that is not installed: pip install 'stepkeeper[man]'"
        ) from error
    os.environ["COLUMNS"] = COLUMNS
    sys.stdout.write(str(Manpage(parser(), format="pretty")))
