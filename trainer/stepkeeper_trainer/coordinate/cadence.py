"""When the next periodic save is due: every so many steps, every so many minutes, or as often as pays.

Pure: instants are arguments, seconds of one monotonic clock.  Steps are the same on all ranks, clocks are not:
what depends on time is decided by rank 0 alone, and the others hear of it in the agreement (`Proposal.want`).
"""

from __future__ import annotations

import math
import re
import statistics
from collections import deque
from dataclasses import dataclass, field

from stepkeeper_trainer.errors import UsageError
from stepkeeper_trainer.formats.interval import Costs, FailureRate, best_interval_s, floor_interval_s

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


@dataclass(slots=True)
class Cadence:
    """Decides whether a save is due, from what saves cost and how often nodes fail."""

    rule: Rule
    nodes: int = 1
    rate: FailureRate = field(default_factory=FailureRate)
    overhead_max: float = OVERHEAD_MAX
    longest_s: float = LONGEST_S
    first_after_s: float = FIRST_AFTER_S
    _blocked: deque[float] = field(default_factory=lambda: deque(maxlen=SAVES_KEPT))
    _persist: deque[float] = field(default_factory=lambda: deque(maxlen=SAVES_KEPT))
    _began_at: float | None = None  # of the newest save, or of training
    _began_step: int | None = None

    def __post_init__(self) -> None:
        """Refuse bounds that cannot be kept."""
        if self.nodes < 1 or not 0 < self.overhead_max < 1 or self.longest_s <= 0:
            raise UsageError(
                f"cadence of {self.nodes} nodes, overhead {self.overhead_max:g}, longest {self.longest_s:g} s: "
                "nodes and longest are more than 0, the overhead is between 0 and 1"
            )

    def start(self, step: int, now: float) -> None:
        """Say that training begins (or resumes) with `step` steps done: the clock runs from here."""
        self._began_at, self._began_step = now, step

    def due_by_steps(self, step: int) -> bool:
        """Whether the number of steps asks for a save: the same answer on every rank, at the same boundary."""
        return bool(self.rule.every_steps) and step % (self.rule.every_steps or 1) == 0

    def due_by_time(self, step: int, now: float) -> bool:
        """Whether the clock asks for a save after `step`: rank 0's answer counts."""
        if not self.rule.timed or self._began_at is None or step == self._began_step:
            return False  # nothing new to save
        return now - self._began_at >= self.interval_s

    def due(self, step: int, now: float) -> bool:
        """Whether a save is due after `step`, for a process alone or for rank 0."""
        return self.due_by_steps(step) or self.due_by_time(step, now)

    def note_begun(self, step: int, now: float) -> None:
        """Say that a save began, for whatever reason: an emergency save counts as well as a periodic one."""
        self._began_at, self._began_step = now, step

    def note_save(self, blocked_s: float, persist_s: float) -> None:
        """Take in what a committed save cost: training's loss of time in sum, and the time from request to durable."""
        if math.isfinite(blocked_s) and math.isfinite(persist_s):
            self._blocked.append(max(0.0, blocked_s))
            self._persist.append(max(0.0, persist_s))

    def note_running(self, at: float, node_hours: float) -> None:
        """Take in that so many node-hours passed until `at` (Unix seconds) without an infrastructure failure."""
        self.rate.observe(at, node_hours=node_hours)

    def note_failure(self, at: float, node_hours: float = 0.0) -> None:
        """Take in an infrastructure failure at `at` (Unix seconds), after so many more node-hours."""
        self.rate.observe(at, node_hours=node_hours, failures=1.0)

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
            return self.first_after_s
        # never two in flight, and never more than the allowed share of time
        least_s = max(floor_interval_s(costs), costs.blocked_s * (1 / self.overhead_max - 1))
        return max(least_s, min(best_interval_s(costs), self.longest_s)) + costs.blocked_s
