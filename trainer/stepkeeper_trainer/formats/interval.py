"""How long to train between two saves: the exact optimum of the cost model that Young and Daly approximate.

The model.  Failures come at random, one in `mtbf_s` on average.  Every `interval_s` of training a save blocks
training for `blocked_s`; its snapshot is durable `persist_s` after it began, and until then a failure falls
back to the one before.  After a failure, `restart_s` pass before training goes on; failures in that time, and
while the same work is done again, count too.  With `persist_s == blocked_s` this is Daly's model.

    time until one more snapshot is durable = M (1 - e^(-c/M)) e^((restart + interval + persist)/M)
    where M = mtbf and c = interval + blocked

The best interval x = interval/M solves x = 1 - e^(-(x + blocked/M)): neither the restart nor the persist time
moves it.  The persist time is its floor: two saves are never in flight.

J. W. Young, A first order approximation to the optimum checkpoint interval, CACM 17 (1974); J. T. Daly, A higher
order estimate of the optimum checkpoint interval for restart dumps, FGCS 22 (2006).

How often a node fails, learnt while the job runs: a Gamma-Poisson estimate over node-hours.

Infrastructure only: lost nodes, fatal hardware errors, and what else would also have hit another job on the same
nodes.  A mistake in the training script, a preemption and a time limit are no failures in this sense: they follow
other laws, and more checkpoints are not the cure.

The prior is one failure in 200 node-days of 8 GPUs, 5e-3 per node-day, held as weakly as one observation:
between the 3.8e-3 of Llama 3's pre-training (419 unplanned interruptions of 2,048 nodes in 54 days;
arXiv 2407.21783, section 3.3.4) and the 6.5e-3 of Meta's RSC-1 cluster (RSC-2: 2.3e-3; arXiv 2410.21680).
"""

from __future__ import annotations

import math

import msgspec

HALVINGS = 200  # of the bracket around the optimum: more than a double has bits


class Costs(msgspec.Struct, frozen=True, kw_only=True):
    """What a save, a failure and a restart cost, in seconds."""

    blocked_s: float  # training stands still, or is slowed by as much in sum, for each save
    persist_s: float  # from the request of a save to durable
    restart_s: float = 0.0  # from a failure to the first new step: detection, start, load
    mtbf_s: float  # of the whole job

    def problem(self) -> str | None:
        """Say which value makes no sense; None where all do."""
        for name in ("blocked_s", "persist_s", "restart_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                return f"{name} is {value:g}: it must be a number of seconds, 0 or more"
        if not self.mtbf_s > 0:
            return f"mtbf_s is {self.mtbf_s:g}: it must be more than 0"
        return None


def productive_share(interval_s: float, costs: Costs) -> float:
    """Return the expected share of wall time that becomes durable progress (the effective training time ratio, ETTR).

    Args:
        interval_s: of training between two saves, without their blocked time; more than 0.
        costs: of saves and failures.
    """
    assert interval_s > 0, "an interval takes time"
    mtbf_s = costs.mtbf_s
    cycle_s = interval_s + costs.blocked_s
    if math.isinf(mtbf_s):
        return interval_s / cycle_s
    redone = (costs.restart_s + interval_s + max(costs.persist_s, costs.blocked_s)) / mtbf_s
    expected_s = -mtbf_s * math.expm1(-cycle_s / mtbf_s)  # until the next snapshot is durable, or a failure
    return (interval_s / expected_s) * math.exp(-redone)


def best_interval_s(costs: Costs) -> float:
    """Return the interval with the largest productive share: the exact optimum, or the floor of the persist time.

    Without failures that is never (infinite); where saves block nothing it is the persist time itself.
    """
    floor_s = floor_interval_s(costs)
    if math.isinf(costs.mtbf_s):
        return math.inf
    if not costs.blocked_s:
        return floor_s
    blocked = costs.blocked_s / costs.mtbf_s
    low, high = 0.0, 1.0  # x - (1 - e^-(x + blocked)) is negative at 0, positive at 1, and crosses once
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        if middle + math.expm1(-(middle + blocked)) < 0:
            low = middle
        else:
            high = middle
    return max(high * costs.mtbf_s, floor_s)


def floor_interval_s(costs: Costs) -> float:
    """Return the shortest interval: the next save begins when the one before is durable."""
    return max(0.0, costs.persist_s - costs.blocked_s)


def young_s(costs: Costs) -> float:
    """Return Young's first-order interval, for comparison."""
    return math.sqrt(2 * costs.blocked_s * costs.mtbf_s)


def daly_s(costs: Costs) -> float:
    """Return Daly's higher-order interval, for comparison."""
    blocked, mtbf = costs.blocked_s, costs.mtbf_s
    if blocked >= 2 * mtbf:
        return mtbf
    ratio = blocked / (2 * mtbf)
    return math.sqrt(2 * blocked * mtbf) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - blocked


RELIABILITY_VARIABLE = "STEPKEEPER_RELIABILITY"  # `FAILURES:NODE_HOURS` of the run so far, for its ranks
PRIOR_FAILURES = 1.0
PRIOR_NODE_HOURS = 200 * 24.0
HALF_LIFE_S = 7 * 86400.0  # what was seen a week ago counts half: nodes are repaired, and age


class FailureRate(msgspec.Struct, kw_only=True):
    """What was seen so far, with the weight that it still has.  Pure: instants are arguments."""

    failures: float = 0.0
    node_hours: float = 0.0
    seen_at: float | None = None  # Unix seconds; of the newest observation
    prior_failures: float = PRIOR_FAILURES
    prior_node_hours: float = PRIOR_NODE_HOURS
    half_life_s: float = HALF_LIFE_S

    def observe(self, at: float, *, node_hours: float, failures: float = 0.0) -> None:
        """Take in that `node_hours` passed until `at`, with so many infrastructure failures in them."""
        if self.seen_at is not None and at > self.seen_at:
            kept = 0.5 ** ((at - self.seen_at) / self.half_life_s)
            self.failures *= kept
            self.node_hours *= kept
        self.seen_at = at if self.seen_at is None else max(at, self.seen_at)
        self.node_hours += max(0.0, node_hours)
        self.failures += max(0.0, failures)

    @property
    def per_node_hour(self) -> float:
        """The expected rate: the mean of the posterior."""
        return (self.prior_failures + self.failures) / (self.prior_node_hours + self.node_hours)

    def mtbf_s(self, nodes: int) -> float:
        """Return the mean time between failures of a job on so many nodes, in seconds."""
        rate = nodes * self.per_node_hour
        return 3600.0 / rate if rate > 0 else math.inf
