"""`docs/cli.md`: every command with its arguments, from the parsers."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Mapping
from typing import Any

from stepkeeper.cli.main import parser
from tests.pages.tables import MADE, linked

SETTING = "setting "  # how the names of settings begin among the destinations of options
DEFAULT = re.compile(r" \(default: [^()]*\)$")

HEAD = """# Commands

{made}

`stepkeeper COMMAND --help` prints the same, with the whole text of each setting.

RUN is a run directory, or the number of any job that has worked on the run.  The run in this directory is the working
directory if that is a run directory.  Otherwise it is `STEPKEEPER_RUN_DIR`, or else the newest one below `runs/`.

Reading commands take `--json`.  Exit codes are in [exit codes](exit-codes.md), settings in
[configuration](configuration.md).  An option that is a link is a setting: the link leads to all that it does.

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
    if command.epilog and "xit codes" not in command.epilog:  # these have a page of their own
        lines += ["", linked(_text(command.epilog, {"prog": command.prog}))]
    return "\n".join(lines)


def _row(action: argparse.Action, prog: str) -> str:
    if action.help == argparse.SUPPRESS or isinstance(action, argparse._HelpAction | argparse._SubParsersAction):
        return ""
    value = action.metavar or ("" if action.nargs == 0 or isinstance(action, argparse.BooleanOptionalAction) else None)
    if value is None:
        value = "|".join(map(str, action.choices)) if action.choices else action.dest.upper()
    if isinstance(value, tuple):
        value = " ".join(value)
    text = _text(action.help or "", {**vars(action), "prog": prog})
    names = [f"{name} {value}".strip() for name in action.option_strings] or [value]
    if not action.option_strings and action.nargs in {"*", "+"}:
        names = [f"{value} ..."]
    shown = ", ".join(f"`{name}`".replace("|", "\\|") for name in names)
    if key := _setting(action):
        shown = f"[{shown}](configuration.md#{key.replace('.', '')})"
        text = _first_sentence(text)
    return f"| {shown} | {linked(text)} |"


def _setting(action: argparse.Action) -> str:
    """Return the key of the setting that an option sets, if it sets one."""
    return action.dest.removeprefix(SETTING) if action.dest.startswith(SETTING) else ""


def _first_sentence(text: str) -> str:
    """Return the first sentence of a help text, and its default."""
    default = DEFAULT.search(text)
    return re.split(r"\. (?=[A-Z`0-9])", text.removesuffix(default[0]) if default else text)[0] + (
        default[0] if default else ""
    )


def _text(text: str, values: Mapping[str, Any]) -> str:
    return " ".join((text % values if "%" in text else text).split()).replace("|", "\\|")
