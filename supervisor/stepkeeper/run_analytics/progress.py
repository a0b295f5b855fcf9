"""How far a run is, and when it will be done: by its own recent pace, without pauses.  Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from itertools import pairwise

import msgspec

from stepkeeper.cli.printing import duration, instant
from stepkeeper.run_store.status import Status

PAUSE_TIMES = 3.0  # a step that took longer than so many usual ones was a pause: a save, an evaluation, a suspension
BAR_MOST, BAR_LEAST = 40, 10  # columns


class Row(msgspec.Struct, frozen=True):
    """A completed step, as `metrics.csv` has it."""

    step: int
    loss: float | None  # None: the script reports none
    at: float  # Unix seconds; 0: not known
    launch: tuple[int, int]  # attempt, launch


def pace(rows: Sequence[Row]) -> float | None:
    """Return the seconds of a step: the mean of those of the newest launch that were no pauses; None if not known."""
    if not rows:
        return None
    newest = [row for row in rows if row.launch == rows[-1].launch and row.at > 0]
    times = [
        (after.at - before.at) / (after.step - before.step)
        for before, after in pairwise(newest)
        if after.step > before.step and after.at >= before.at
    ]
    if not times:
        return None
    median = statistics.median(times)
    return statistics.fmean([each for each in times if each <= PAUSE_TIMES * median])


def seconds_left(status: Status, rows: Sequence[Row]) -> float | None:
    """Return for how long training goes on without pauses; None where the number of steps or the pace is not known."""
    if status.total_steps is None or status.step is None:
        return None
    a_step = pace(rows) or status.step_seconds
    if a_step is None or not math.isfinite(a_step):
        return None
    return max(0, status.total_steps - status.step) * a_step


def share(status: Status) -> float | None:
    """Return how much of the steps is done, 0 to 1; None where their number is not known."""
    if not status.total_steps or status.step is None:
        return None
    return min(1.0, status.step / status.total_steps)


def steps(status: Status) -> str:
    """Return the newest step in words: `1,200 of 10,000`."""
    if status.step is None:
        return "none completed yet" + (f" of {status.total_steps:,}" if status.total_steps else "")
    return f"{status.step:,}" + (f" of {status.total_steps:,}" if status.total_steps else "")


def loss(status: Status) -> str:
    """Return the newest loss in words; empty where the script reports none."""
    if status.loss_not_finite:
        return "loss NaN or infinite"
    return f"loss {status.loss:.5g}" if status.loss is not None else ""


def bar(done: float, room: int, *, plain: bool) -> str:
    """Return a progress bar of at most `room` columns."""
    width = max(BAR_LEAST, min(BAR_MOST, room))
    filled = int(done * width)
    full, empty = ("#", ".") if plain else ("█", "░")
    return full * filled + empty * (width - filled)


def eta(left_s: float | None, now: float, *, works: bool) -> str:
    """Return when training will be done, in words.

    Args:
        left_s: of `seconds_left`.
        now: Unix seconds.
        works: steps are being completed; else nobody knows when they will be.
    """
    if left_s is None:
        return ""
    if not works:
        return f"{duration(left_s)} of training left"
    return f"ETA {duration(left_s)} ({instant(now + left_s)[:-3]})"
