"""The steps of each launch, in columns: a million rows take 32 MB.  `read` is the only I/O here."""

from __future__ import annotations

import math
import statistics
from array import array
from itertools import pairwise
from pathlib import Path

from stepkeeper.seeing.model import micro
from stepkeeper.store import lines
from stepkeeper_trainer.formats.plain import open_plain

Key = tuple[int, int]  # attempt, launch
ROWS_MAX = 20_000_000
NONE = math.nan  # a step without a loss; one whose loss is no number has an infinite one here
AT_MAX = 1e11  # Unix seconds beyond it are a torn line


class Rows:
    """The completed steps of one launch, oldest first."""

    __slots__ = ("at", "loss", "rate", "step", "tokens")

    def __init__(self) -> None:
        self.at = array("q")  # microseconds
        self.step = array("q")
        self.loss = array("d")
        self.rate = array("d")  # the learning rate
        self.tokens = 0  # of the newest

    def add(self, at: float, step: int, loss: float | None, tokens: int = 0, rate: float | None = None) -> None:
        """Append one; time never goes back."""
        instant = micro(at)
        if self.at and instant < self.at[-1]:
            instant = self.at[-1]
        self.at.append(instant)
        self.step.append(step)
        self.loss.append(NONE if loss is None else math.inf if math.isnan(loss) else loss)
        self.rate.append(NONE if rate is None else rate)
        self.tokens = tokens

    def __len__(self) -> int:
        return len(self.at)

    def usual(self) -> int:
        """Return the median time of a step, microseconds; 0 where that is not known."""
        times = [
            (after - before) // max(1, later - earlier)
            for (before, after), (earlier, later) in zip(pairwise(self.at), pairwise(self.step), strict=True)
        ]
        return int(statistics.median(times)) if times else 0


def read(path: Path) -> dict[Key, Rows]:
    """Return what `metrics.csv` tells of each launch.  A missing file tells nothing; torn lines are passed over.

    Raises:
        OSError: it is there and cannot be read.
    """
    found: dict[Key, Rows] = {}
    try:
        file = open_plain(path, within=path.parent)
    except FileNotFoundError:
        return found
    with file:
        for count, line in enumerate(lines.forwards(file)):
            if count >= ROWS_MAX:
                break
            cells = line.split(b",")
            try:
                step, tokens, at = int(cells[0]), int(cells[2]), float(cells[5])
                loss = float(cells[1]) if cells[1] else None
                rate = float(cells[3]) if cells[3] else None
                key = int(cells[6]), int(cells[7])
            except (ValueError, IndexError):
                continue  # the header, or torn
            if 0 < at < AT_MAX and 0 <= step < 2**53:
                found.setdefault(key, Rows()).add(at, step, loss, tokens, rate)
    return found
