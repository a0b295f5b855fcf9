"""Many simulated runs of one kind: the mean, how far they spread, and what the formula of `stepkeeper plan` says."""

from __future__ import annotations

import math
import statistics

import msgspec

from stepkeeper.core.policy import Policy
from stepkeeper.run_analytics.model import Use
from stepkeeper.simulate.simulator import Simulator
from stepkeeper.simulate.world import Result, World
from stepkeeper_trainer.coordinate.cadence import Costs, productive_share


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """What came of one choice, over all seeds."""

    interval_s: float
    spares: int
    ettr: float  # mean
    ettr_low: float  # the worst and the best of the simulated runs
    ettr_high: float
    speed: float  # steps that count, as a share of those that all nodes would do in all the time; mean
    formula: float | None  # with the restart time that the simulation found; None where it does not hold
    shares: dict[Use, float]  # of the time, means
    restart_s: float  # mean, from a failure to the next first step
    failures: float  # means a run
    requeues: float
    persons: float
    node_share: float  # of all node-hours held, spares included: those that the steps that count would take
    stopped_for: tuple[str, ...]  # why a person was needed, the first few


def simulate(world: World, policy: Policy, *, runs: int, seed: int) -> Summary:
    """Simulate a choice `runs` times, with seeds from `seed` on: the same each time."""
    found = [Simulator(world, policy, seed + index).run() for index in range(runs)]
    ettrs = sorted(result.ettr for result in found)
    shares = {use: _mean([result.spent[use] / result.wall_s for result in found]) for use in Use}
    mean = _mean(ettrs)
    restarts = [result.restart_s for result in found if result.hits]
    restart_s = _mean(restarts) if restarts else 0.0
    held = _mean([result.held_node_s for result in found])
    return Summary(
        interval_s=world.interval_s,
        spares=world.spares,
        ettr=mean,
        ettr_low=ettrs[0],
        ettr_high=ettrs[-1],
        formula=_formula(world, restart_s),
        shares=shares,
        restart_s=restart_s,
        failures=_mean([float(result.hits) for result in found]),
        requeues=_mean([float(result.attempts - 1) for result in found]),
        persons=_mean([float(result.persons) for result in found]),
        speed=_mean([result.speed for result in found]),
        node_share=world.nodes * _mean([result.steps_s for result in found]) / held if held else 0.0,
        stopped_for=_reasons(found),
    )


def _formula(world: World, restart_s: float) -> float | None:
    """Return what the plan expects; it knows failures only: no preemption, no time limit, no smaller world."""
    if world.preemptions_per_day or world.nodes_min or not math.isinf(world.time_limit_s):
        return None
    costs = Costs(
        blocked_s=world.blocked_s,
        persist_s=max(world.persist_s, world.blocked_s),
        restart_s=restart_s,
        mtbf_s=world.mtbf_s,
    )
    return productive_share(world.interval_s, costs)


def _reasons(found: list[Result]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(reason for result in found for reason in result.stopped_for))[:5]


def _mean(values: list[float]) -> float:
    return statistics.fmean(values)
