"""`metrics.csv`, from its end: how far a launch came."""

from __future__ import annotations

import csv
import math
from pathlib import Path
from typing import NamedTuple

from stepkeeper.store import lines

NAME = "metrics.csv"
BYTES_MAX = 512 * 1024  # of its end that are read: thousands of steps


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
        file = lines.open_plain(run / NAME)
    except FileNotFoundError:
        return None
    with file:
        header = file.readline(4096).decode(errors="replace").strip().split(",")
        start = max(file.tell(), file.seek(0, 2) - BYTES_MAX)
        file.seek(start)
        text = file.read(BYTES_MAX).decode(errors="replace")
    step = wrong = None
    for row in csv.DictReader(text.splitlines(), fieldnames=header):
        if (row.get("attempt"), row.get("launch")) != (str(attempt), str(launch)):
            continue
        number, loss = _number(row.get("step")), _number(row.get("loss"))
        if number is None or not number.is_integer():
            continue
        step = int(number)
        if wrong is None and loss is not None and not math.isfinite(loss):
            wrong = step
    return Ended(step, wrong) if step is not None else None


def _number(text: str | None) -> float | None:
    try:
        return float(text or "")
    except ValueError:  # torn, or left out
        return None
