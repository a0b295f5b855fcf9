"""What two runs' records prove: nothing was lost, and what each interruption cost.  Pure but for reading them."""

from __future__ import annotations

import csv
import itertools
import math
from collections.abc import Iterator
from pathlib import Path

import msgspec

ROUNDING = 1e-4  # relative: sums of a GPU are not always made in the same order


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One line of metrics.csv."""

    step: int
    loss: str
    at: float
    attempt: int
    launch: int


class Interruption(msgspec.Struct, frozen=True, kw_only=True):
    """From the last step before it to the first one after it."""

    requeued: bool  # else relaunched in the same allocation
    after_step: int
    seconds: float  # from the last old step to the first new one
    redone: int  # steps that were done twice


class Proof(msgspec.Struct, frozen=True, kw_only=True):
    """Two runs compared."""

    steps: int
    equal: int  # losses that are the same to the last bit
    largest_difference: float  # relative, of the others
    missing: int  # steps that only one of the runs has
    interruptions: tuple[Interruption, ...]

    def holds(self, *, exactly: bool) -> bool:
        """Whether nothing was lost: all losses are the same, to the last bit or within rounding."""
        same = self.equal == self.steps or (not exactly and self.largest_difference <= ROUNDING)
        return same and self.missing == 0 and self.steps > 0


def read(metrics: Path) -> list[Row]:
    """Return the rows in the order in which they were written; none where the file is not there yet."""
    try:
        text = metrics.read_text(errors="replace")  # of one instant: rows may follow a header that was not there yet
    except FileNotFoundError:
        return []
    return list(_rows(csv.DictReader(text.splitlines())))


def _rows(reader: csv.DictReader[str]) -> Iterator[Row]:
    for line in reader:
        try:
            yield Row(
                step=int(line["step"]),
                loss=line["loss"],
                at=float(line["time"]),
                attempt=int(line["attempt"]),
                launch=int(line["launch"]),
            )
        except (KeyError, TypeError, ValueError):
            continue  # the last line is being written


def compare(reference: list[Row], tested: list[Row]) -> Proof:
    """Compare the losses of two runs; a later row of a step supersedes the earlier one."""
    expected = {row.step: row.loss for row in reference}
    found = {row.step: row.loss for row in tested}
    both = expected.keys() & found.keys()
    differences = [_difference(expected[step], found[step]) for step in both]
    return Proof(
        steps=len(both),
        equal=sum(expected[step] == found[step] for step in both),
        largest_difference=max(differences, default=0.0),
        missing=len(expected.keys() ^ found.keys()),
        interruptions=tuple(interruptions(tested)),
    )


def _difference(one: str, other: str) -> float:
    if one == other:
        return 0.0
    a, b = float(one or "nan"), float(other or "nan")
    difference = abs(a - b) / max(abs(a), abs(b), 1e-30)
    return difference if math.isfinite(difference) else math.inf


def interruptions(rows: list[Row]) -> Iterator[Interruption]:
    """Return where one launch ended and the next one went on."""
    launches = [list(group) for _, group in itertools.groupby(rows, lambda row: (row.attempt, row.launch))]
    for before, after in itertools.pairwise(launches):
        furthest = max(row.step for row in before)
        redone = sum(row.step <= furthest for row in after)
        new = next((row for row in after if row.step > furthest), None)
        if new is not None:
            yield Interruption(
                requeued=after[0].attempt != before[0].attempt,
                after_step=furthest,
                seconds=new.at - before[-1].at,
                redone=redone,
            )
