"""What asks for a save although nobody does: steps, rank 0's clock, and the end of an epoch.

Steps and epochs are the same on all ranks.  What the clock says, rank 0 says to the others in the agreement, so all
save at the same boundary.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from typing import TYPE_CHECKING

from stepkeeper_trainer.coordinate.agreement import Want, Wish
from stepkeeper_trainer.coordinate.cadence import Cadence
from stepkeeper_trainer.formats.interval import FailureRate
from stepkeeper_trainer.log import say

if TYPE_CHECKING:
    from collections.abc import Callable

    from stepkeeper_trainer.coordinate.cadence import Rule
    from stepkeeper_trainer.save.listeners import CommittedStep


OBSERVE_EVERY_S = 60.0  # node-hours that passed without a failure are taken in so often
STEPS_KEPT = 64  # whose median tells how long a step usually takes
CHANGED_BY = 1.25  # an interval that is so much longer or shorter is told


class Toll:
    """What a save takes from training: how much longer than usual the steps last until it is durable, in sum."""

    def __init__(self) -> None:
        """Nothing is known."""
        self._usual: deque[float] = deque(maxlen=STEPS_KEPT)
        self._during: list[float] = []

    def step(self, seconds: float, *, saving: bool) -> None:
        """Take in how long a step lasted, and whether a save was in flight in it."""
        if saving:
            self._during.append(seconds)
        else:
            self._usual.append(seconds)

    @property
    def usual_s(self) -> float:
        """How long a step usually lasts; 0 where nothing is known."""
        return statistics.median(self._usual) if self._usual else 0.0

    def settle(self, blocked_s: float) -> float:
        """Return what the save that is durable now took: at least the time for which training stood still."""
        during, self._during = self._during, []
        if not self._usual:
            return blocked_s
        usual_s = statistics.median(self._usual)
        return max(blocked_s, sum(seconds - usual_s for seconds in during))


class Periodic:
    """Whether a save is due, at the boundaries of a launch."""

    def __init__(
        self,
        rule: Rule,
        *,
        rank: int,
        nodes: int,
        seen: tuple[float, float] | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """Prepare; `seen` is what the run has seen so far: failures of the infrastructure, and node-hours."""
        self._rule = rule
        self._clocked = rank == 0 and rule.timed
        rate = FailureRate()
        if seen is not None:
            rate.observe(wall(), failures=seen[0], node_hours=seen[1])
        self._cadence = Cadence(rule, nodes=nodes, rate=rate)
        self._nodes = nodes
        self._now, self._wall = clock, wall
        self._toll = Toll()
        self._stepped_at: float | None = None
        self._saving = False  # a save was in flight since the boundary before
        self._begun_since = False  # a save has, since the ranks last spoke
        self._priced = ""  # save_id of the newest save whose cost is known
        self._observed_at = clock()
        self._told_s: float | None = None  # the interval that was told
        self.due = False  # a save is due, and has not been begun
        self.epoch_end = False  # it is the end of an epoch that is to be saved

    @property
    def usual_step_s(self) -> float:
        """How long a step usually lasts; 0 where nothing is known."""
        return self._toll.usual_s

    def start(self, step: int) -> None:
        """Say that training begins or goes on with `step` steps done."""
        self._stepped_at = self._observed_at = self._now()
        self._cadence.start(step, self._stepped_at)

    def step(self, step: int, *, epoch_end: bool) -> None:
        """Take in that a step is complete."""
        now = self._now()
        if self._stepped_at is not None:
            self._toll.step(now - self._stepped_at, saving=self._saving)
        self._stepped_at = now
        self.epoch_end |= epoch_end
        self.due |= epoch_end or self._cadence.due_by_steps(step)

    def paused(self) -> None:
        """Say that the step at hand has something else in it, such as an evaluation: its time tells nothing."""
        self._stepped_at = None

    def asks(self, step: int) -> bool:
        """Whether rank 0's clock asks for a save after `step`; the others have no say."""
        if not self._clocked:
            return False
        now = self._now()
        if now - self._observed_at >= OBSERVE_EVERY_S:
            self._cadence.note_running(self._wall(), self._nodes * (now - self._observed_at) / 3600)
            self._observed_at = now
        return self._cadence.due_by_time(step, now)

    def hear(self, agreed: Wish) -> None:
        """Take over what all ranks have heard of rank 0's clock, unless a save has begun since it was said."""
        self.due |= agreed.want is Want.DUE and not self._begun_since

    def begun(self, step: int) -> None:
        """Say that a save has begun, for whatever reason."""
        self.due = self.epoch_end = False
        self._begun_since = True
        self._cadence.note_begun(step, self._now())

    def make_up_epoch_end(self) -> None:
        """Say that the save of an epoch's end came to nothing: the next one is due now, and marked in its place."""
        self.due = self.epoch_end = True

    def spoken(self, *, saving: bool) -> None:
        """Say at the end of a boundary whether a save is in flight in the step to come."""
        self._saving = saving
        self._begun_since = False
        if self._stepped_at is None:
            self._stepped_at = self._now()

    def note_commit(self, newest: CommittedStep | None) -> None:
        """Take in what the newest save cost that is committed, once; at a boundary, as the steps count (rank 0)."""
        if newest is None or newest.save_id == self._priced:
            return
        self._priced = newest.save_id
        self._cadence.note_save(self._toll.settle(newest.blocked_s), newest.persist_s or 0.0)
        self._tell()

    def _tell(self) -> None:
        """Say what the clock's interval is, when it has changed much."""
        costs = self._cadence.costs
        if not self._clocked or not self._rule.auto or costs is None:
            return
        interval_s, told_s = self._cadence.interval_s, self._told_s
        if told_s is not None and 1 / CHANGED_BY < interval_s / told_s < CHANGED_BY:
            return
        self._told_s = interval_s
        say(
            "checkpoint_interval",
            seconds=round(interval_s, 1),
            blocked_s=round(costs.blocked_s, 4),
            persist_s=round(costs.persist_s, 3),
            mtbf_h=round(costs.mtbf_s / 3600, 1),
            nodes=self._nodes,
        )
