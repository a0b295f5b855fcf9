"""The command line: one module a command or two, each thin: arguments in, a call, words out.

A command module has `add(subcommands)`, which declares its arguments, and `execute(arguments)`, which
returns the exit code.  A module is loaded when its command is called: the supervisor's memory does not hold the others.
"""

from __future__ import annotations

import argparse
import importlib
from typing import Any, Protocol, cast

COMMANDS = (
    "run",
    "submit",
    "status",
    "save",
    "stop",
    "resume",
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


MODULES = {"save": "requests", "stop": "requests"}  # of commands whose module has another name


class Command(Protocol):
    """What a command module has."""

    def add(self, subcommands: argparse._SubParsersAction[Any]) -> None:
        """Declare its commands and their arguments."""
        ...


def load(name: str) -> Command:
    """Return the module of a command."""
    return cast("Command", importlib.import_module(f"{__name__}.{MODULES.get(name, name)}"))
