"""How often a node fails, learnt while the job runs: a Gamma-Poisson estimate over node-hours.

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
