"""When the next periodic save is due: every so many steps, every so many minutes, or as often as pays.

Pure: instants are arguments, seconds of one monotonic clock.  Steps are the same on all ranks, clocks are not:
what depends on time is decided by rank 0 alone, and the others hear of it in the agreement (`Proposal.want`).

How long to train between two saves: the exact optimum of the cost model that Young and Daly approximate.

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
import re
import statistics
from collections import deque
from dataclasses import dataclass, field

import msgspec

from stepkeeper_trainer.errors import UsageError

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


OVERHEAD_MAX = 0.05  # of training time may go into blocked time, whatever the failure rate
LONGEST_S = 3600.0  # `auto` knows infrastructure failures only: all else costs an hour of work at most
FIRST_AFTER_S = 60.0  # the first save of a launch that knows no costs yet: it measures them
SAVES_KEPT = 8  # whose costs are looked at
_RULE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*(steps?|s|sec|seconds?|m|min|minutes?|h|hours?)")
_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """What a user asked for.  Several may be set: the first one that is due counts."""

    every_steps: int | None = None
    every_s: float | None = None
    auto: bool = False

    @property
    def timed(self) -> bool:
        """Whether a clock has a say, and rank 0 must decide for all."""
        return self.auto or self.every_s is not None


def parse_rule(text: str) -> Rule:
    """Read `500 steps`, `500`, `30 min`, `2h`, `auto`, `never`, or several of them joined by `or`.

    Raises:
        UsageError: which part cannot be read.
    """
    steps: list[int] = []
    seconds: list[float] = []
    auto = False
    for part in re.split(r"\s*\bor\b\s*|\s*,\s*", text.strip().lower()):
        if part == "never":
            continue
        if part == "auto":
            auto = True
            continue
        match = _RULE.fullmatch(f"{part} steps" if part.isdigit() else part)
        amount = float(match.group(1)) if match else 0.0
        if match is None or amount <= 0 or (match.group(2).startswith("step") and not amount.is_integer()):
            raise UsageError(
                f"checkpoint cadence {text!r}: {part!r} cannot be read; "
                "write `500 steps`, `30 min`, `auto`, or several joined by `or`"
            )
        if match.group(2).startswith("step"):
            steps.append(int(amount))
        else:
            seconds.append(amount * _SECONDS[match.group(2)[0]])
    return Rule(every_steps=min(steps, default=None), every_s=min(seconds, default=None), auto=auto)


def choose_rule(environment: str | None, every: str | int | Rule | None) -> Rule:
    """Return the rule that counts: the environment's, else the script's; None never asks for a save.

    Raises:
        UsageError: it cannot be read.
    """
    if environment is not None:
        return parse_rule(environment)
    if isinstance(every, Rule):
        return every
    return Rule() if every is None else parse_rule(str(every))


def snapshot_rule(text: str | None) -> Rule:
    """Return how often snapshots in memory are taken; None never asks for one.

    Raises:
        UsageError: it cannot be read, or is `auto`: what a failure costs, only the user can weigh against memory.
    """
    rule = parse_rule(text) if text is not None else Rule()
    if rule.auto:
        raise UsageError(f"snapshot cadence {text!r}: `auto` is for saves; write `5 steps` or `30 s`")
    return rule


@dataclass(slots=True)
class Cadence:
    """Decides whether a save is due, from what saves cost and how often nodes fail."""

    rule: Rule
    nodes: int = 1
    rate: FailureRate = field(default_factory=FailureRate)
    _blocked: deque[float] = field(default_factory=lambda: deque(maxlen=SAVES_KEPT))
    _persist: deque[float] = field(default_factory=lambda: deque(maxlen=SAVES_KEPT))
    _began_at: float | None = None  # of the newest save, or of training
    _began_step: int | None = None

    def due_by_steps(self, step: int) -> bool:
        """Whether the number of steps asks for a save: the same answer on every rank, at the same boundary."""
        return bool(self.rule.every_steps) and step % (self.rule.every_steps or 1) == 0

    def due_by_time(self, step: int, now: float) -> bool:
        """Whether the clock asks for a save after `step`: rank 0's answer counts."""
        if not self.rule.timed or self._began_at is None or step == self._began_step:
            return False  # nothing new to save
        return now - self._began_at >= self.interval_s

    def note_begun(self, step: int, now: float) -> None:
        """Say that training begins with `step` steps done, or that a save has begun, for whatever reason."""
        self._began_at, self._began_step = now, step

    def note_save(self, blocked_s: float, persist_s: float) -> None:
        """Take in what a committed save cost: training's loss of time in sum, and the time from request to durable."""
        if math.isfinite(blocked_s) and math.isfinite(persist_s):
            self._blocked.append(max(0.0, blocked_s))
            self._persist.append(max(0.0, persist_s))

    def note_running(self, at: float, node_hours: float) -> None:
        """Take in that so many node-hours passed until `at` (Unix seconds) without an infrastructure failure."""
        self.rate.observe(at, node_hours=node_hours)

    @property
    def costs(self) -> Costs | None:
        """What a save is expected to cost; None before the first one.

        The median of the blocked times, as the first save is dearer than the rest; the longest of the persist
        times, as the next save has to wait for it.
        """
        if not self._blocked:
            return None
        return Costs(
            blocked_s=statistics.median(self._blocked),
            persist_s=max(self._persist),
            mtbf_s=self.rate.mtbf_s(self.nodes),
        )

    @property
    def interval_s(self) -> float:
        """Seconds from the begin of one save to the begin of the next, as the clock's rules want it now."""
        wanted = math.inf if self.rule.every_s is None else self.rule.every_s
        if self.rule.auto:
            wanted = min(wanted, self._auto_s())
        return wanted

    def _auto_s(self) -> float:
        costs = self.costs
        if costs is None:
            return FIRST_AFTER_S
        # never two in flight, and never more than the allowed share of time
        least_s = max(floor_interval_s(costs), costs.blocked_s * (1 / OVERHEAD_MAX - 1))
        return max(least_s, min(best_interval_s(costs), LONGEST_S)) + costs.blocked_s
