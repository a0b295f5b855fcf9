"""The command line: one module a command, or a few of one idea, each thin: arguments in, a call, words out.

A command module has `add(subcommands)`, which declares its arguments, and `execute(arguments)`, which returns the exit
code; None is 0.  What `execute` raises becomes one line (`printing.safely`), unless the command `is_service`: that one
has a log.  A module is loaded when its command is called: the supervisor's memory does not hold the others.
"""

from __future__ import annotations

import argparse
import importlib
from typing import Any, Protocol, cast

COMMANDS = (
    "run",
    "submit",
    "resume",
    "status",
    "save",
    "stop",
    "events",
    "logs",
    "report",
    "explain",
    "checkpoints",
    "plan",
    "doctor",
    "selftest",
    "xid",
    "node",
    "completion",
    "man",
    "dev",
)


MODULES = {  # of commands whose module has another name
    "save": "requests",
    "stop": "requests",
    "resume": "submit",
    "selftest": "doctor",
    "completion": "main",
    "man": "main",
}


class Command(Protocol):
    """What a command module has."""

    def add(self, subcommands: argparse._SubParsersAction[Any]) -> None:
        """Declare its commands and their arguments."""
        ...


def load(name: str) -> Command:
    """Return the module of a command."""
    return cast("Command", importlib.import_module(f"{__name__}.{MODULES.get(name, name)}"))
