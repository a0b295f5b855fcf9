"""What was suspended of a run's time: the supervisor did not run, and the ranks completed no steps.  Pure.

The supervisor knows for how long it stood still itself.  Where the batch host alone did, steps went on meanwhile, and
nothing was suspended: what the steps of that time took longer than usual tells the two apart.
"""

from __future__ import annotations

import statistics
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence

from stepkeeper.seeing.model import Attempt, Launch, Use
from stepkeeper.seeing.rows import Key, Rows

Stretch = tuple[int, int]
Piece = tuple[int, int, Use]
# of a stretch: where its steps were less late in sum, they went on meanwhile.  Far from 1: the supervisor was waiting
# for some seconds before it was stopped, and Slurm stops the ranks two seconds later
SHARE_MIN = 0.25


def usual(rows: Rows, still: Sequence[Stretch]) -> int:
    """Return the median time of a step without what it was suspended for; 0 where that is not known."""
    away: dict[int, int] = {}
    for begin, end in still:
        for row in range(max(1, bisect_right(rows.at, begin)), min(len(rows), bisect_left(rows.at, end) + 1)):
            since, until = max(begin, rows.at[row - 1]), min(end, rows.at[row])
            inside = begin < rows.at[row - 1] and rows.at[row] < end  # done while the supervisor alone stood still
            if not inside:
                away[row] = away.get(row, 0) + max(0, until - since)
    if not away:
        return rows.usual()
    times = [
        max(0, rows.at[row] - rows.at[row - 1] - away.get(row, 0)) // max(1, rows.step[row] - rows.step[row - 1])
        for row in range(1, len(rows))
    ]
    return int(statistics.median(times)) if times else 0


def stretches(attempt: Attempt, rows: Mapping[Key, Rows], usuals: Mapping[Key, int]) -> list[Stretch]:
    """Return what was suspended of an attempt, in order.

    Args:
        attempt: with the stretches in which its supervisor did not run.
        rows: the completed steps of its launches.
        usuals: what a step of each took.
    """
    taken: dict[tuple[Key, int], int] = {}  # of the time of a step, by earlier stretches
    found: list[Stretch] = []
    for begin, end in attempt.still:
        launch = _launch_at(attempt, begin, end)
        key = (launch.attempt, launch.number) if launch is not None else (-1, -1)
        known = rows.get(key)
        if not known:
            found.append((begin, end))
            continue
        parts = _late(known, usuals[key], (begin, end), {row: part for (of, row), part in taken.items() if of == key})
        if sum(until - since for since, until, _ in parts) < SHARE_MIN * (end - begin):
            continue
        for since, until, row in parts:
            taken[key, row] = taken.get((key, row), 0) + until - since
            found.append((since, until))
    return found


def _launch_at(attempt: Attempt, begin: int, end: int) -> Launch | None:
    """Return the newest launch that ran in a stretch."""
    for launch in reversed(attempt.launches):
        if launch.began < end:
            return launch if launch.ended is None or launch.ended > begin else None
    return None


def _late(rows: Rows, a_step: int, stretch: Stretch, taken: Mapping[int, int]) -> list[tuple[int, int, int]]:
    """Return how late the steps of a stretch were, in sum, as parts of it: (begin, end, row of the step)."""
    begin, end = stretch
    steps: list[tuple[int, int, int, int]] = []
    for row in range(bisect_right(rows.at, begin), min(len(rows), bisect_left(rows.at, end)) + 1):
        since = max(begin, rows.at[row - 1]) if row else begin
        until = min(end, rows.at[row]) if row < len(rows) else end
        late = until - since  # before the first step and after the last one nothing was due
        if 0 < row < len(rows):
            count = max(1, rows.step[row] - rows.step[row - 1])
            late = rows.at[row] - rows.at[row - 1] - a_step * count - taken.get(row, 0)
        steps.append((since, until, late, row))
    left = max(0, sum(late for _, _, late, _ in steps))
    parts = []
    for since, until, late, row in steps:
        part = min(left, max(0, late), until - since)
        left -= part
        if part:
            parts.append((until - part, until, row))
    return parts


def taken_out(piece: Piece, still: Sequence[Stretch]) -> Iterator[Piece]:
    """Split a piece into what was suspended and the rest; `still` is in order."""
    at, end, use = piece
    for begin, until in still[bisect_left(still, at, key=lambda each: each[1]) :]:
        if begin >= end:
            break
        since, to = max(at, begin), min(end, until)
        if since < to:
            yield at, since, use
            yield since, to, Use.SUSPENDED
            at = to
    yield at, end, use
