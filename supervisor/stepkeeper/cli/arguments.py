"""What words on the command line mean: numbers, times and sizes, for argparse, and the command after `--`."""

from __future__ import annotations

import argparse
import contextlib
import math
import re
from collections.abc import Iterator, Sequence
from typing import BinaryIO

from stepkeeper.errors import NotFoundError, UsageError

_DURATION = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*(ms|s|sec|min|m|h|hours?|d|days?)?")
_SECONDS = {"": 1.0, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_SIZE = re.compile(r"([0-9.]+(?:e[0-9]+)?)\s*([KMGT]i?)?B?", re.IGNORECASE)
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def whole(text: str) -> int:
    """Return a whole number above 0."""
    if not (text.isascii() and text.isdigit() and int(text)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def above_zero(text: str) -> float:
    """Return a number above 0."""
    value = _number(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not more than 0")
    return value


def share(text: str) -> float:
    """Return a number between 0 and 1."""
    value = _number(text)
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not between 0 and 1")
    return value


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{text!r} is no number")
    return value


def duration(text: str) -> float:
    """Return the seconds of `90s`, `5min`, `3h`, `2d`."""
    match = _DURATION.fullmatch(text.strip().lower())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no time: write seconds, or 90s, 5min, 3h, 2d")
    unit = match.group(2) or ""
    return float(match.group(1)) * _SECONDS[unit if unit in _SECONDS else unit[0]]


def size(text: str) -> int:
    """Return the bytes of `5GB`, `500M` (powers of 1,000) or `2GiB`."""
    match = _SIZE.fullmatch(text.strip())
    try:
        unit = (match.group(2) or "").lower() if match else ""
        found = int(float(match.group(1)) * (1024 if unit.endswith("i") else 1000) ** _POWERS[unit[:1]]) if match else 0
    except (ValueError, OverflowError):
        found = 0
    if found <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no size: write 5GB, 500M or 2GiB")
    return found


@contextlib.contextmanager
def opened(name: str, what: str) -> Iterator[BinaryIO]:
    """Open a file that is to be read; `-` is stdin.

    Raises:
        StepkeeperError: it cannot be opened or read; `what` says what can be named.
    """
    try:
        with open(0 if name == "-" else name, "rb", closefd=name != "-") as file:
            yield file
    except BrokenPipeError:
        raise  # of our own output
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise NotFoundError(f"{name}: {why}: name {what}, or -") from error


def add_run(command: argparse.ArgumentParser) -> None:
    """Declare which run is meant."""
    command.add_argument(
        "run", nargs="?", metavar="RUN", help="run directory or job id (default: the run in this directory)"
    )


def add_launch(command: argparse.ArgumentParser, default: str) -> None:
    """Declare which launch is meant."""
    command.add_argument("--attempt", type=int, metavar="N", help=f"of this attempt (default: {default})")
    command.add_argument("--launch", type=int, metavar="N", help=f"of this launch (default: {default})")


def is_named(arguments: argparse.Namespace, attempt: int, launch: int) -> bool:
    """Tell whether a launch is one of those that are meant."""
    return arguments.attempt in (None, attempt) and arguments.launch in (None, launch)


def not_there(arguments: argparse.Namespace, known: Sequence[tuple[int, int]]) -> str:
    """Say which launches were meant, and which there are."""
    asked = f"{'*' if arguments.attempt is None else arguments.attempt}"
    asked += f".{'*' if arguments.launch is None else arguments.launch}"
    there = ", ".join(f"{attempt}.{launch}" for attempt, launch in known[-10:])
    return f"attempt.launch {asked}; there are those of {there}"


def add_cmd(parser: argparse.ArgumentParser) -> None:
    """Declare the user's command after `--`."""
    parser.add_argument("cmd", nargs=argparse.REMAINDER, metavar="-- CMD ARGS...")


def read_cmd(words: list[str], name: str) -> tuple[str, ...]:
    """Return the user's command.

    Raises:
        StepkeeperError: there is none, or an option of ours stands in its place.
    """
    found = words[1:] if words[:1] == ["--"] else words
    if not found:
        raise UsageError(f"no CMD: write `stepkeeper {name} [options] -- CMD ARGS...`")
    if words[:1] != ["--"] and found[0].startswith("-"):
        raise UsageError(f"unknown option {found[0]}; CMD comes after `--`; see `stepkeeper {name} --help`")
    return tuple(found)
