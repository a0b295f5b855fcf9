"""`docs/cli.md`: every command with its arguments, from the parsers."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from typing import Any

from stepkeeper.cli.main import parser
from tests.pages.tables import MADE

HEAD = """# Commands

{made}

`stepkeeper COMMAND --help` prints the same.  RUN is a run directory, or the number of any job that has worked on the
run.  The run in this directory is the working directory if that is a run directory.  Otherwise it is
`STEPKEEPER_RUN_DIR`, or else the newest one below `runs/`.

Reading commands take `--json`.  Exit codes are in [exit codes](exit-codes.md), settings in
[configuration](configuration.md).

"""


def page() -> str:
    """Return the page."""
    sections = [_section(command, summary) for command, summary in _commands(parser())]
    return HEAD.format(made=MADE) + "\n\n".join(sections) + "\n"


def _commands(top: argparse.ArgumentParser) -> Iterator[tuple[argparse.ArgumentParser, str]]:
    for action in top._actions:
        if isinstance(action, argparse._SubParsersAction):
            summaries = {each.dest: each.help or "" for each in action._choices_actions}
            for name, below in action.choices.items():
                yield below, summaries.get(name, "")
                yield from _commands(below)


def _section(command: argparse.ArgumentParser, summary: str) -> str:
    lines = [f"## {command.prog}", "", _text(command.description or summary, {"prog": command.prog})]
    rows = [row for action in command._actions if (row := _row(action, command.prog))]
    if rows:
        lines += ["", "| argument | what it does |", "|---|---|", *rows]
    return "\n".join(lines)


def _row(action: argparse.Action, prog: str) -> str:
    if action.help == argparse.SUPPRESS or isinstance(action, argparse._HelpAction | argparse._SubParsersAction):
        return ""
    value = action.metavar or ("" if action.nargs == 0 or isinstance(action, argparse.BooleanOptionalAction) else None)
    if value is None:
        value = "|".join(map(str, action.choices)) if action.choices else action.dest.upper()
    if isinstance(value, tuple):
        value = " ".join(value)
    names = [f"{name} {value}".strip() for name in action.option_strings] or [value]
    if not action.option_strings and action.nargs in {"*", "+"}:
        names = [f"{value} ..."]
    shown = ", ".join(f"`{name}`".replace("|", "\\|") for name in names)
    return f"| {shown} | {_text(action.help or '', {**vars(action), 'prog': prog})} |"


def _text(text: str, values: Mapping[str, Any]) -> str:
    return " ".join((text % values if "%" in text else text).split()).replace("|", "\\|")
