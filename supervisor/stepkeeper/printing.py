"""Printing for people and programs: plain, aligned, and safe whatever a file holds.

What stands in run directories was written by training scripts, and may hold terminal escape sequences.
People see it without control characters; programs get ASCII JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import unicodedata
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from stepkeeper.core.exits import ExitCode
from stepkeeper.errors import StepkeeperError

_INVISIBLE = {"Cc", "Cf", "Cs", "Co", "Zl", "Zp"}  # control, format (such as right-to-left), surrogates


def safely(execute: Callable[[argparse.Namespace], int | None], arguments: argparse.Namespace) -> int:
    """Return the exit code of a command whose output suits any terminal, and that no file ends in a traceback."""
    for stream in (sys.stdout, sys.stderr):
        if reconfigure := getattr(stream, "reconfigure", None):
            reconfigure(errors="backslashreplace")
    try:
        code = execute(arguments)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader left: `stepkeeper events RUN | head`
        _drop_output()
        return 0
    except OSError as error:
        _drop_output()
        what = error.filename if error.filename is not None else "output"
        why = error.strerror or str(error)
        raise StepkeeperError(f"{clean(str(what))}: {why}", ExitCode.RUN_DIRECTORY) from error
    except StepkeeperError as error:
        raise StepkeeperError(clean(str(error)), error.code) from error
    return code or 0


def _drop_output() -> None:
    """Send what is still to be written nowhere, so that the interpreter's own last flush succeeds."""
    try:
        sys.stdout.flush()
    except OSError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def clean(text: str) -> str:
    r"""Return text without what could act on a terminal; tabs become blanks.

    >>> clean("loss \x1b[31m0.5\x1b[0m\tdone\x07")
    'loss [31m0.5[0m done'
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        " " if character in "\t\n" else character
        for character in text
        if character in "\t\n" or unicodedata.category(character) not in _INVISIBLE
    )


def say(text: str = "") -> None:
    """Print one line for people."""
    sys.stdout.write(clean(text) + "\n")


def say_path(path: str) -> None:
    """Print a path: to a terminal without what could act on it, to a program byte for byte."""
    if sys.stdout.isatty():
        say(path)
        return
    sys.stdout.flush()
    sys.stdout.buffer.write(os.fsencode(path) + b"\n")


def warn(text: str) -> None:
    """Print one line for people on stderr."""
    sys.stderr.write(clean(text) + "\n")


def say_json(document: Any, *, indent: int | None = 2) -> None:
    """Print one JSON document of plain values and structs.  ASCII only, so that no terminal acts on it."""
    sys.stdout.write(json.dumps(document, indent=indent, allow_nan=False, default=msgspec.to_builtins) + "\n")


def say_json_line(document: Any) -> None:
    """Print one of several JSON documents, each on a line of its own."""
    say_json(document, indent=None)


def say_table(rows: Sequence[Sequence[str]], *, right: frozenset[int] = frozenset()) -> None:
    """Print aligned columns; those in `right` are aligned to the right, the last one is not padded."""
    cleaned = [[clean(cell) for cell in row] for row in rows]
    widths = [max(len(row[column]) for row in cleaned) for column in range(len(cleaned[0]))]
    for row in cleaned:
        cells = [
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        say("  ".join(cells).rstrip())


def or_dash(value: object) -> str:
    """Return what a column shows of a value; `-` where there is none."""
    return "-" if value is None else str(value)


def instant(at: float) -> str:
    """Return Unix seconds in the reader's time zone.  A torn value is shown, not interpreted."""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))
    except (ValueError, OverflowError, OSError):
        return f"{at:g}"


def duration(seconds: float) -> str:
    """Return a span in words that fit in a column.

    >>> duration(0.25), duration(59), duration(3700), duration(200_000)
    ('0.25 s', '59 s', '1 h 01 min', '2 d 7 h')
    """
    if seconds < 10:  # noqa: PLR2004 - below it, fractions matter
        return f"{seconds:.2g} s"
    if seconds < 120:  # noqa: PLR2004
        return f"{seconds:.0f} s"
    minutes = int(seconds // 60)
    if minutes < 60:  # noqa: PLR2004
        return f"{minutes} min"
    if minutes < 48 * 60:
        return f"{minutes // 60} h {minutes % 60:02d} min"
    return f"{minutes // 1440} d {minutes % 1440 // 60} h"


def size(count: int) -> str:
    """Return a number of bytes in words.

    >>> size(512), size(20_480), size(3 * 1024**3)
    ('512 B', '20.0 KiB', '3.0 GiB')
    """
    if count < 1024:  # noqa: PLR2004
        return f"{count} B"
    amount = count / 1024
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        if amount < 1024:  # noqa: PLR2004
            return f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.1f} PiB"
