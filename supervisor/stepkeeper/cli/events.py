"""`stepkeeper events RUN`: the journal as a timeline."""

from __future__ import annotations

import argparse
import os
from collections import deque
from typing import Any

import msgspec

from stepkeeper import printing
from stepkeeper.cli.arguments import add_run
from stepkeeper.errors import NotFoundError, UsageError
from stepkeeper.printing import instant
from stepkeeper.reason_text import text
from stepkeeper.run_store import find, journal
from stepkeeper.run_store.journal import Line

DETAIL_CHARACTERS_MAX = 400
_SHOWN_ELSEWHERE = ("event", "at", "launch", "attempt", "job_id", "restart_count")
_EMPTY: tuple[Any, ...] = (None, "", (), [], {})
_JSON_ONLY = ("losses",)  # hundreds of numbers


def add(subcommands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    command = subcommands.add_parser(
        "events",
        help="show what happened in a run, and why",
        description="Show what happened in a run, and why: the journal as a timeline.",
    )
    add_run(command)
    command.add_argument("--last", type=int, metavar="N", help="only the newest N records")
    command.add_argument("--json", action="store_true", help="the records as JSON lines (docs/events.md)")
    command.set_defaults(execute=execute)


def execute(arguments: argparse.Namespace) -> None:
    """Print the journal of a run."""
    if arguments.last is not None and arguments.last < 1:
        raise UsageError("--last is at least 1")
    run = find.find(arguments.run, os.environ)
    if not run.journal.exists():
        raise NotFoundError(f"{run.journal}: not there: no supervisor has worked on this run yet")
    show = _show_json if arguments.json else _show
    torn = 0
    newest: deque[Line] = deque()
    for line in journal.read_lines(run.journal, newest_first=arguments.last is not None):
        if line.record is None:
            torn += 1
        elif arguments.last is None:
            show(line)
        else:
            newest.appendleft(line)
            if len(newest) == arguments.last:
                break
    for line in newest:
        show(line)
    if torn:
        printing.warn(f"{torn} lines passed over: torn by a crash, or of a newer Stepkeeper")


def _show_json(line: Line) -> None:
    printing.say_json_line(msgspec.json.decode(line.data))  # as it stands there: also what a newer version added


def _show(line: Line) -> None:
    record = line.record
    assert record is not None, "the caller passes over torn lines"
    event = msgspec.to_builtins(record.event)
    launch = f"{record.attempt}.{record.launch}"
    said = printing.clean(_words(event, without=_SHOWN_ELSEWHERE + _JSON_ONLY))
    if len(said) > DETAIL_CHARACTERS_MAX:
        said = said[:DETAIL_CHARACTERS_MAX] + "..."
    name = event["event"]
    printing.say(f"{instant(record.event.at)}  {launch:<6} {record.phase.value:<10}  {name:<20}  {said}".rstrip())
    margin = " " * 21
    if record.why:
        printing.say(f"{margin}why: {record.why}")
    for effect in record.effects:
        ordered = msgspec.to_builtins(effect)
        if reasons := getattr(effect, "reasons", ()):
            ordered["reasons"] = text(reasons)
        printing.say(f"{margin}-> {ordered['effect']} {_words(ordered, without=('effect',))}".rstrip())


def _words(fields: dict[str, Any], without: tuple[str, ...]) -> str:
    """Return `key=value` for each field that holds something."""
    shown = {key: value for key, value in fields.items() if key not in without and value not in _EMPTY}
    return " ".join(f"{key}={_word(value)}" for key, value in shown.items())


def _word(value: Any) -> str:
    match value:
        case float():
            return f"{value:.6g}" if abs(value) < 1e8 else instant(value)  # noqa: PLR2004 - Unix seconds
        case list() | tuple():
            return ",".join(_word(item) for item in value) or "none"
        case dict():
            return "(" + " ".join(f"{key}={_word(item)}" for key, item in value.items()) + ")"
        case None:
            return "none"
        case _:
            text = str(value)
            return repr(text) if " " in text or not text else text
