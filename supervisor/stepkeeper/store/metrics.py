"""`metrics.csv`, from its end: how far a launch came, and what the losses were."""

from __future__ import annotations

import csv
import math
from pathlib import Path
from typing import NamedTuple

from stepkeeper_trainer.formats.plain import open_plain

NAME = "metrics.csv"
BYTES_MAX = 512 * 1024  # of its end that are read: thousands of steps
LOSSES_MAX = 64  # for the loss watch of the next attempt: enough though a resume drops the newest half of them


class Ended(NamedTuple):
    """How far a launch came."""

    step: int
    wrong_step: int | None  # the first whose loss is no finite number


def ended_at(run: Path, attempt: int, launch: int) -> Ended | None:
    """Return the last step of a launch; None where it completed none, or the script writes none.

    Raises:
        OSError: the file is there and cannot be read.
    """
    try:
        rows = _newest_rows(run)
    except FileNotFoundError:
        return None
    step = wrong = None
    for row in rows:
        if (row.get("attempt"), row.get("launch")) != (str(attempt), str(launch)):
            continue
        number, loss = _number(row.get("step")), _number(row.get("loss"))
        if number is None or not number.is_integer():
            continue
        step = int(number)
        if wrong is None and loss is not None and not math.isfinite(loss):
            wrong = step
    return Ended(step, wrong) if step is not None else None


def losses_before(run: Path, most: int = LOSSES_MAX) -> tuple[tuple[int, float], ...]:
    """Return steps and losses of the newest state, oldest first: at most so many, spread over the end of the file.

    Steps that were done again count once, as they were done last.  What cannot be read tells nothing: the loss watch
    then begins anew.
    """
    try:
        rows = _newest_rows(run)
    except OSError:
        return ()
    found: list[tuple[int, float]] = []
    for row in reversed(rows):
        step, loss = _number(row.get("step")), _number(row.get("loss"))
        if step is None or loss is None or not (step.is_integer() and math.isfinite(loss)):
            continue
        if not found or step < found[-1][0]:  # else it was done again later
            found.append((int(step), loss))
    every = max(1, -(-len(found) // most))
    return tuple(reversed(found[::every]))


def _newest_rows(run: Path) -> list[dict[str, str | None]]:
    """Return what the end of the file holds, oldest first.  Raises OSError."""
    with open_plain(run / NAME, within=run) as file:
        header = file.readline(4096).decode(errors="replace").strip().split(",")
        start = max(file.tell(), file.seek(0, 2) - BYTES_MAX)
        file.seek(start)
        text = file.read(BYTES_MAX).decode(errors="replace")
    return list(csv.DictReader(text.splitlines(), fieldnames=header))


def _number(text: str | None) -> float | None:
    try:
        return float(text or "")
    except ValueError:  # torn, or left out
        return None
