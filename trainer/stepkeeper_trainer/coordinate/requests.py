"""What asks for a save or a stop, and what all ranks agreed to do of it.

The supervisor asks, or a signal: SIGTERM and SIGUSR1 set a flag, and nothing else; what they mean is decided at a step
boundary.  Without anybody steps ask, rank 0's clock, and the end of an epoch (`Periodic`).  Steps and epochs are the
same on all ranks.  What the clock says, rank 0 says to the others in the agreement, so all save at the same boundary.
"""

from __future__ import annotations

import signal
import statistics
import threading
import time
from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from stepkeeper_trainer.coordinate.agreement import Proposal, Want
from stepkeeper_trainer.coordinate.cadence import Cadence, FailureRate, snapshot_rule
from stepkeeper_trainer.log import say, warn

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    from stepkeeper_trainer.coordinate.cadence import Rule
    from stepkeeper_trainer.formats.messages import SaveRequest
    from stepkeeper_trainer.link import Link
    from stepkeeper_trainer.save.commit import CommittedStep
    from stepkeeper_trainer.tiers.tiering import Tiering


ALONE_AFTER_S = 30.0  # without a watcher; a restarted one is back within a second
SIGNAL_COUNTS_S = 300.0  # a supervisor that has not stopped the run by then does not mean to


class Owner:
    """Who saves on notice in this process: the script's CheckpointManager comes before a framework's attachment."""

    def __init__(self) -> None:
        self.has_manager = False
        self.withdraw: Callable[[str], None] | None = None  # of the attachment

    def take(self) -> None:
        """Say that a CheckpointManager is made, on all ranks."""
        self.has_manager = True
        if self.withdraw is not None:
            self.withdraw("the script makes a CheckpointManager, which saves on notice itself")


owner = Owner()


class Requests:
    """Asked is what this rank received; agreed is what all ranks will do, at the same boundary."""

    def __init__(self, link: Link, *, signals: bool = True) -> None:
        """Listen to the supervisor, and with `signals` to SIGTERM and SIGUSR1."""
        self._link = link
        self._signals = SignalFlag(attach=signals)
        self._signal_said: Received | None = None
        self._signal_done: Received | None = None  # acted upon, or forgotten
        self._received: set[tuple[int, bool, float | None]] = set()
        self._saves_asked: set[int] = set()
        self._saves_agreed: set[int] = set()
        self._lock = threading.Lock()  # two threads listen
        self.stop_asked = False
        self.deadline_asked: float | None = None  # Unix seconds
        self.asked_at: float | None = None  # Unix seconds; of the oldest request that is not served
        self.save_agreed = False
        self.stop_agreed = False
        self.deadline_at: float | None = None  # agreed; Unix seconds

    def receive(self) -> None:
        """Take in what has arrived since the last time.  Never blocks."""
        with self._lock:
            self._receive()

    def _receive(self) -> None:
        for request in self._link.receive():
            self._say_once(request)
            if request.stop:
                self.stop_asked = True
            elif request.request_id in self._saves_agreed:
                continue  # every node's watcher sends it: ours came later than another's
            else:
                self._saves_asked.add(request.request_id)
            self.asked_at = self.asked_at or time.time()
            if request.deadline_at is not None:
                self.deadline_asked = min(request.deadline_at, self.deadline_asked or request.deadline_at)
        received = self._signals.received
        if received is not None and received is not self._signal_done:
            self._weigh(received)

    def _say_once(self, request: SaveRequest) -> None:
        """Log a request; a watcher repeats it each second until it is served."""
        key = (request.request_id, request.stop, request.deadline_at)
        if key in self._received:
            return
        self._received.add(key)
        say(
            "request_heard",
            id=request.request_id,
            stop=request.stop,
            deadline_at=request.deadline_at,
            why=request.why,
        )

    def _weigh(self, received: Received) -> None:
        """Obey a signal where no supervisor is there to decide; forget it where one has decided otherwise."""
        now = time.monotonic()
        link = self._link
        if not link.attached or (link.dead and now - link.dead_since >= ALONE_AFTER_S):
            self._signal_done = received
            if not self.stop_asked:
                self.stop_asked = True
                self.asked_at = self.asked_at or time.time()
                say("stop_asked", why=f"{received.signal.name}, and no supervisor to decide")
            return
        if received is not self._signal_said:
            self._signal_said = received
            warn("signal_heard", signal=received.signal.name, why="left to the supervisor")
        if not link.dead and (link.back_at > received.at or now - received.at > SIGNAL_COUNTS_S):
            self._signal_done = received
            say("signal_forgotten", signal=received.signal.name, why="the supervisor is there, and did not ask to stop")

    def propose(self, rank: Proposal, *, due: bool = False, snapshot: bool = False) -> Proposal:
        """Return what this rank has to say to the others: what it was asked for, besides how its saves are."""
        idle = Want.DUE if due else Want.SNAPSHOT if snapshot else Want.NOTHING
        want = Want.STOP if self.stop_asked else Want.SAVE if self._saves_asked else idle
        return replace(
            rank,
            want=want,
            deadline_at=self.deadline_asked,
            request_id=max(self._saves_asked, default=0),
        )

    def agree(self, agreed: Proposal) -> None:
        """Take over what all ranks said."""
        asked = agreed.want >= Want.SAVE  # less is a clock's word, and nobody's request
        if asked:
            self.deadline_at = agreed.deadline_at
        if agreed.want is Want.STOP:
            self.stop_agreed = True
        if asked and agreed.request_id not in self._saves_agreed:
            self.save_agreed = True
            self._saves_agreed.add(agreed.request_id)
        self._saves_asked -= self._saves_agreed

    def limit_at(self, within_s: float) -> float:
        """Return when a save that begins now must be done: Unix seconds, the deadline at the latest."""
        limit_at = time.time() + within_s
        return limit_at if self.deadline_at is None else min(limit_at, self.deadline_at)

    def close(self) -> None:
        """Give the signals back to the script; a run that stops has no more to hear of them."""
        if not self.stop_agreed:
            self._signals.detach()

    def served(self) -> None:
        """Forget the agreed save: it was begun.  A stop stays agreed."""
        self.save_agreed = False
        self.asked_at = None
        if not (self.stop_agreed or self.stop_asked):
            self.deadline_at = self.deadline_asked = None


CAUGHT = (signal.SIGTERM, signal.SIGUSR1)


class Received(NamedTuple):
    """One signal that arrived."""

    signal: signal.Signals
    at: float  # of the monotonic clock


class SignalFlag:
    """Remembers the newest of Slurm's signals; a handler of the script's own is still called."""

    def __init__(self, *, attach: bool) -> None:
        """Install the handlers, where this is the main thread (Python allows it nowhere else)."""
        self.received: Received | None = None
        self._before: dict[int, Any] = {}
        if attach and threading.current_thread() is threading.main_thread():
            for number in CAUGHT:
                self._before[number] = signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.received = Received(signal.Signals(number), time.monotonic())
        before = self._before.get(number)
        if callable(before):
            before(number, frame)

    def detach(self) -> None:
        """Put back the handlers that were there before."""
        for number, before in self._before.items():
            signal.signal(number, before if before is not None else signal.SIG_DFL)
        self._before = {}


OBSERVE_EVERY_S = 60.0  # node-hours that passed without a failure are taken in so often
STEPS_KEPT = 64  # whose median tells how long a step usually takes
CHANGED_BY = 1.25  # an interval that is so much longer or shorter is reported


class Toll:
    """What a save takes from training: how much longer than usual the steps last until it is durable, in sum."""

    def __init__(self) -> None:
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
        self._reported_s: float | None = None  # the interval that was reported
        self.due = False  # a save is due, and has not been begun
        self.epoch_end = False  # it is the end of an epoch that is to be saved

    @property
    def usual_step_s(self) -> float:
        """How long a step usually lasts; 0 where nothing is known."""
        return self._toll.usual_s

    def start(self, step: int, *, saved: bool = True) -> None:
        """Say that training begins or goes on with `step` steps done; if no step directory has them, a save is due."""
        self._stepped_at = self._observed_at = self._now()
        self._cadence.note_begun(step, self._stepped_at)
        self.due = not saved

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

    def comes_after(self, step: int) -> bool:
        """Whether the number of steps asks for a save at the boundary after the one of `step`."""
        return self._cadence.due_by_steps(step + 1)

    def note_agreed(self, agreed: Proposal) -> None:
        """Take over what all ranks know of rank 0's clock, unless a save has begun since it was said."""
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
        self._report()

    def _report(self) -> None:
        """Say what the clock's interval is, when it has changed much."""
        costs = self._cadence.costs
        if not self._clocked or not self._rule.auto or costs is None:
            return
        interval_s, reported_s = self._cadence.interval_s, self._reported_s
        if reported_s is not None and 1 / CHANGED_BY < interval_s / reported_s < CHANGED_BY:
            return
        self._reported_s = interval_s
        say(
            "checkpoint_interval",
            seconds=round(interval_s, 1),
            blocked_s=round(costs.blocked_s, 4),
            persist_s=round(costs.persist_s, 3),
            mtbf_h=round(costs.mtbf_s / 3600, 1),
            nodes=self._nodes,
        )


class SnapshotClock:
    """Whether a snapshot in memory is due, at the boundaries of a launch; a save is as good as one."""

    def __init__(self, rule: Rule, *, rank: int, clock: Callable[[], float] = time.monotonic) -> None:
        """Prepare; a rule that says nothing asks for none."""
        self._cadence = Cadence(rule)
        self._clocked = rank == 0 and rule.timed
        self._now = clock
        self._begun_since = False  # a save or snapshot has, since the ranks last spoke
        self.due = False

    def step(self, step: int) -> None:
        """Take in that a step is complete."""
        self.due |= self._cadence.due_by_steps(step)

    def asks(self, step: int) -> bool:
        """Whether rank 0's clock asks for a snapshot after `step`; the others have no say."""
        return self._clocked and self._cadence.due_by_time(step, self._now())

    def note_agreed(self, agreed: Proposal) -> None:
        """Take over what all ranks know of rank 0's clock, unless a save or snapshot has begun since it was said."""
        self.due |= agreed.want is Want.SNAPSHOT and not self._begun_since

    def begun(self, step: int) -> None:
        """Say that training begins with `step` steps done, or that a save or a snapshot of it has begun."""
        self.due = False
        self._begun_since = True
        self._cadence.note_begun(step, self._now())

    def spoken(self) -> None:
        """Say that the ranks are about to speak."""
        self._begun_since = False


def begin_snapshots(tiering: Tiering | None, *, step: int, rank: int) -> SnapshotClock:
    """Return when snapshots are due, from the `step` that was resumed from on; never, where none can be taken."""
    wanted = tiering.tiers.snapshot_every if tiering is not None and tiering.snapshots is not None else None
    clock = SnapshotClock(snapshot_rule(wanted), rank=rank)
    clock.begun(step)
    return clock
