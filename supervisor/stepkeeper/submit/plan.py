"""The figures of `stepkeeper plan`: for each size of the job, the best interval and what it leaves of the time."""

from __future__ import annotations

import math
import statistics
from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import msgspec

from stepkeeper import printing
from stepkeeper.core import events as on
from stepkeeper.core.state import Phase
from stepkeeper.run_analytics.model import SECOND, Rows
from stepkeeper.run_store import journal
from stepkeeper.run_store.paths import RunDirectory
from stepkeeper_trainer.coordinate.cadence import (
    Costs,
    FailureRate,
    best_interval_s,
    daly_s,
    floor_interval_s,
    productive_share,
    young_s,
)

FIXED_S = (600.0, 1800.0, 3600.0, 4 * 3600.0)  # what people set by hand


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """One interval and what comes of it."""

    interval_s: float
    share: float  # of wall time that becomes durable progress


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """One size of a job."""

    nodes: int
    costs: Costs
    best: Point
    bound: Point | None  # where the allowed overhead makes the interval longer than the best one
    blocked_share: float  # of training time, at the interval to use
    young_s: float
    daly_s: float
    fixed: tuple[Point, ...]

    @property
    def use(self) -> Point:
        """The interval to use: the best one that keeps within the allowed overhead."""
        return self.bound or self.best


def plan(nodes: int, costs: Costs, *, overhead_max: float) -> Plan:
    """Find the best interval for one size of a job."""
    best_s = best_interval_s(costs)
    best = Point(interval_s=best_s, share=productive_share(best_s, costs) if math.isfinite(best_s) else 1.0)
    least_s = costs.blocked_s * (1 / overhead_max - 1)
    bound = Point(interval_s=least_s, share=productive_share(least_s, costs)) if least_s > best_s else None
    use = bound or best
    fixed = [max(seconds, floor_interval_s(costs)) for seconds in FIXED_S]
    return Plan(
        nodes=nodes,
        costs=costs,
        best=best,
        bound=bound,
        blocked_share=costs.blocked_s / (use.interval_s + costs.blocked_s) if use.interval_s else 0.0,
        young_s=young_s(costs),
        daly_s=daly_s(costs),
        fixed=tuple(Point(interval_s=seconds, share=productive_share(seconds, costs)) for seconds in fixed),
    )


# What a run has measured itself: how long saves take and block, restarts last, and how often nodes were lost.
#
# From `journal.jsonl` (commits, nodes, losses) and `metrics.csv` (the time of each step).  Reads only.

SAVES_KEPT = 50  # the newest: an older library or file system is no guide
RESTARTS_KEPT = 20
CLOCK_STEP_S = 0.001  # metrics.csv has milliseconds


class Save(msgspec.Struct, frozen=True, kw_only=True):
    """One committed save that nobody waited for.  Unix seconds."""

    requested_at: float
    durable_at: float


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a run; None where nothing is known."""

    nodes: int | None = None  # of the newest attempt
    saves: int = 0
    persist_s: float | None = None  # median, from request to durable
    blocked_s: float | None = None  # median, of what a save took from training: blocked and slowed steps in sum
    restart_s: float | None = None  # median, from the last step of a launch to the first of the next
    node_hours: float = 0.0
    failures: int = 0  # of the infrastructure
    rate: FailureRate = msgspec.field(default_factory=FailureRate)


class _Attempt(msgspec.Struct):
    nodes: int
    began_at: float
    last_at: float
    ended: bool = False


class _Measured(msgspec.Struct):
    """What the journal holds."""

    saves: list[Save]
    attempts: list[_Attempt]
    lost_at: list[float]  # failures of the infrastructure


def measure(run: RunDirectory) -> Measured:
    """Read what a run has measured.  Missing files say nothing; damaged lines are passed over.

    Raises:
        OSError: a file is there and cannot be read.
    """
    from stepkeeper.run_analytics import reading  # noqa: PLC0415 - a supervisor stays small

    found = _read_journal(run.journal)
    saves, attempts = found.saves[-SAVES_KEPT:], found.attempts
    launches = list(reading.rows(run).values())
    return Measured(
        nodes=attempts[-1].nodes if attempts else None,
        saves=len(saves),
        persist_s=_median([save.durable_at - save.requested_at for save in saves]),
        blocked_s=_median(_taken_by_saves(saves, launches)),
        restart_s=_median(_restarts(launches)[-RESTARTS_KEPT:]),
        node_hours=sum(_hours(attempt) for attempt in attempts),
        failures=len(found.lost_at),
        rate=_rate(found),
    )


def reliability(run_journal: Path) -> FailureRate:
    """Return how often the infrastructure has failed in a run, as far as its journal shows.

    Raises:
        OSError: the journal is there and cannot be read.
    """
    return _rate(_read_journal(run_journal))


def _read_journal(run_journal: Path) -> _Measured:
    found = _Measured([], [], [])
    attempts = found.attempts
    losses = 0
    for record in journal.read(run_journal):
        event = record.event
        if isinstance(event, on.AttemptStarted):
            if attempts and not attempts[-1].ended:
                found.lost_at.append(attempts[-1].last_at)  # its batch node went, or it was killed: not distinguished
            attempts.append(_Attempt(max(1, len(event.nodes)), event.at, event.at))
        if attempts:
            attempts[-1].last_at = max(attempts[-1].last_at, event.at)
            attempts[-1].ended |= record.phase is Phase.DONE
        if record.node_losses > losses:
            found.lost_at.extend([event.at] * (record.node_losses - losses))
        losses = record.node_losses
        if isinstance(event, on.CheckpointCommitted) and not event.emergency:
            found.saves.append(Save(requested_at=event.at - event.seconds, durable_at=event.at))
    return found


def _rate(found: _Measured) -> FailureRate:
    rate = FailureRate()
    for attempt in found.attempts:
        rate.observe(attempt.last_at, node_hours=_hours(attempt))
        failed = [at for at in found.lost_at if attempt.began_at <= at <= attempt.last_at]
        rate.observe(attempt.last_at, node_hours=0.0, failures=len(failed))
    return rate


def _hours(attempt: _Attempt) -> float:
    return attempt.nodes * (attempt.last_at - attempt.began_at) / 3600


def _median(values: list[float]) -> float | None:
    return statistics.median(values) if values else None


def _restarts(launches: Sequence[Rows]) -> list[float]:
    """Return the times from the last step of one launch to the first of the next, in seconds."""
    times = ((after.at[0] - before.at[-1]) / SECOND for before, after in pairwise(launches))
    return [each for each in times if each > 0]


def _taken_by_saves(saves: list[Save], launches: Sequence[Rows]) -> list[float]:
    """Return what each save took from training: how much longer than the median its steps lasted, in sum.

    Steps count from the request until the first step that began after the save was durable.
    """
    pairs = [(begin / SECOND, end / SECOND) for rows in launches for begin, end in pairwise(rows.at)]
    if not pairs:
        return []
    usual_s = statistics.median(end - begin for begin, end in pairs)
    ends = [end for _, end in pairs]
    taken = []
    for save in saves:
        excess: list[float] = []
        for begin, end in pairs[bisect_right(ends, save.requested_at + CLOCK_STEP_S) :]:
            if begin >= save.durable_at:
                break
            excess.append(end - begin - usual_s)
        if excess:
            taken.append(max(0.0, sum(excess)))
    return taken


def short(seconds: float) -> str:
    """Return a span in few characters.

    >>> short(3600), short(float("inf"))
    ('1 h', 'never')
    """
    return "never" if math.isinf(seconds) else printing.duration(seconds).replace(" 00 min", "")
