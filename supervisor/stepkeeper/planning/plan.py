"""The figures of `stepkeeper plan`: for each size of the job, the best interval and what it leaves of the time."""

from __future__ import annotations

import math

import msgspec

from stepkeeper_trainer.formats.interval import (
    Costs,
    best_interval_s,
    daly_s,
    floor_interval_s,
    productive_share,
    young_s,
)

FIXED_S = (600.0, 1800.0, 3600.0, 4 * 3600.0)  # what people set by hand
CURVE_POINTS = 97
CURVE_DECADES = 2.0  # to each side of the best interval


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


def curve(costs: Costs, low_s: float, high_s: float) -> list[Point]:
    """Return the productive share over intervals from `low_s` to `high_s`, evenly spaced on a logarithmic axis."""
    first_s = max(low_s, floor_interval_s(costs), 1e-3)
    if first_s >= high_s:
        return []
    ratio = (high_s / first_s) ** (1 / (CURVE_POINTS - 1))
    intervals = (first_s * ratio**index for index in range(CURVE_POINTS))
    return [Point(interval_s=seconds, share=productive_share(seconds, costs)) for seconds in intervals]


def span(plans: list[Plan]) -> tuple[float, float]:
    """Return the intervals between which the curves of all plans say something."""
    best = [each.use.interval_s for each in plans if math.isfinite(each.use.interval_s) and each.use.interval_s > 0]
    low, high = min(best, default=60.0), max(best, default=3600.0)
    floor = min(floor_interval_s(each.costs) for each in plans)
    return max(low / 10 ** (CURVE_DECADES / 2), floor, 1e-3), high * 10 ** (CURVE_DECADES / 2)
