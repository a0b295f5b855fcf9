"""Months of a run in a second: a world that answers the orders of the real `decide`, event by event.

What is simulated is the world only: its failures, and how long everything takes.  What is done about them is decided
by `core`, with its budgets, deadlines and retries.  Node names cost time and change nothing, so of the nodes of a
launch at most `NAMED_MAX` have one; a failure of any of the others befalls one of these.  Where a launch may shrink,
it does so by what a name stands for.
"""

from __future__ import annotations

import heapq
import math
import random
import statistics
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec

from stepkeeper.core import effects as do
from stepkeeper.core import events as on
from stepkeeper.core.causes import Cause
from stepkeeper.core.decide import decide
from stepkeeper.core.exits import ExitCode
from stepkeeper.core.phases import Decision
from stepkeeper.core.policy import Policy
from stepkeeper.core.state import Phase, State
from stepkeeper.reason_text import text
from stepkeeper.run_analytics.model import Use
from stepkeeper.simulate.world import MIX, Accounts, Kind, Progress, Result, World
from stepkeeper_trainer.coordinate.cadence import Costs, productive_share

# What will happen in a simulated world, in the order of time.


class QueuedEvent(NamedTuple):
    """One thing that happens."""

    at: float
    number: int  # in the order of scheduling
    what: on.Event | str  # an event for `decide`, or the name of what the world does
    launch: int | None  # it is void when another launch runs


class EventQueue:
    """All that is scheduled."""

    def __init__(self) -> None:
        """Nothing is."""
        self._heap: list[QueuedEvent] = []
        self._scheduled = 0

    @property
    def next_at(self) -> float:
        """When the next one comes; infinity where there is none."""
        return self._heap[0].at if self._heap else math.inf

    def add(self, at: float, what: on.Event | str, launch: int | None) -> None:
        """Schedule something; of the same instant, what was scheduled first comes first."""
        self._scheduled += 1
        heapq.heappush(self._heap, QueuedEvent(at, self._scheduled, what, launch))

    def pop(self) -> QueuedEvent:
        """Take the next one."""
        return heapq.heappop(self._heap)

    def clear(self) -> None:
        """Schedule nothing any more."""
        self._heap.clear()


NAMED_MAX = 64
TURNS_MAX = 50_000_000  # a run that decides so much is stuck
CAUSES = {Kind.FAULT: Cause.NODE_FAULT, Kind.LOST: Cause.NODE_LOST, Kind.FAILURE: Cause.NETWORK}


Listener = Callable[[State, on.Event, Decision], None]


class Simulator:
    """One simulated run."""

    def __init__(self, world: World, policy: Policy, seed: int, listener: Listener | None = None) -> None:
        self.world = world
        self.listener = listener  # of every decision
        self.policy = msgspec.structs.replace(policy, hang_watch=False)  # no message of single steps comes here
        self.random = random.Random(seed)  # noqa: S311 - the same run for the same seed
        self.result = Result()
        self.now = 0.0
        self.turns = EventQueue()
        self.state = State()
        self.over = False  # this attempt
        self.serial = 0  # of launches, over all attempts
        self.hurt: Kind | None = None  # what befell the launch
        self.struck: Kind | None = None  # what befell the one before
        self.dead: set[str] = set()
        self.incidents = 0
        self.facts: dict[str, float] = {}  # what Slurm would say of the job
        self.named = min(world.nodes, NAMED_MAX)
        self.left: set[str] = set()  # names that this attempt has given back
        self.repaired_at: list[float] = []  # when nodes that were given back, or others in their place, are idle
        self.progress = Progress()
        self.accounts = Accounts(self.result, world, self.named)

    def run(self) -> Result:
        """Play until the days are over."""
        end = self.world.days * 86_400.0
        while self.now < end:
            self._attempt(end)
            self.now = min(end, self.now)
        self._pause()
        self._spend(self.accounts.use)
        self._hold()
        self.result.wall_s = self.now
        self.result.steps_s = self.progress.done.steps_s
        return self.result

    # --- one attempt ------------------------------------------------------------------------------

    def _attempt(self, end: float) -> None:
        before, budgets = self.state, self.state.budgets
        nodes = tuple(f"n{index}" for index in range(self.named + self.world.spares))
        number = self.result.attempts
        self.result.attempts += 1
        self.turns.clear()
        self.left.clear()
        self.repaired_at.clear()  # it comes with as many nodes as it wants: the queue has waited for them
        self.accounts.held(self.now, 0)  # while it waited
        self.state, self.over, self.dead, self.hurt, self.facts = State(), False, set(), None, {}
        self._spend(Use.STARTING)
        started: dict[str, Any] = {"job_id": 1, "restart_count": number, "attempt": number}
        self._feed(
            on.AttemptStarted(
                at=self.now, nodes=nodes, nodes_wanted=self.named, nodes_min=self._names_min(), batch_node=nodes[0],
                kill_wait_s=30.0, previous="" if not number else "requeued", **started,
                failures=budgets.failures, best_step=budgets.best_step, node_losses=budgets.node_losses,
                tried=budgets.tried, excluded=before.nodes.excluded, baseline=before.baseline,
                skipped_data=before.resume.skipped_data,
            )
        )  # fmt: skip
        self._later(self._gap(), "fail")
        if self.world.preemptions_per_day:
            self._later(self.random.expovariate(self.world.preemptions_per_day / 86_400.0), "preempt")
        self._later(max(1.0, self.world.time_limit_s - self.world.limit_notice_s), "limit")
        self.facts = {"end": self.now + self.world.time_limit_s}
        for _ in range(TURNS_MAX):
            deadline = self.state.wake_at
            following = self.turns.next_at
            if self.over:
                return
            at = min(following, deadline if deadline is not None else float("inf"))
            if at >= end:
                self.now = end
                return
            self.now = max(self.now, at)
            if deadline is not None and deadline <= following:
                self._feed(on.Tick(at=self.now))
                continue
            turn = self.turns.pop()
            if turn.launch is not None and turn.launch != self.serial:
                continue
            if isinstance(turn.what, str):
                getattr(self, f"_do_{turn.what}")()
            else:
                self._feed(msgspec.structs.replace(turn.what, at=self.now))
        raise AssertionError(f"stuck in {self.state}")

    def _names_min(self) -> int:
        """Return how many names a launch may shrink to; 0: it may not."""
        return math.ceil(self.world.nodes_min * self.named / self.world.nodes)

    def _later(self, after: float, what: on.Event | str, *, launch: int | None = None) -> None:
        self.turns.add(self.now + after, what, launch)

    def _spend(self, use: Use) -> None:
        self.accounts.spend(self.now, use)

    # --- what befalls it --------------------------------------------------------------------------

    def _gap(self) -> float:
        held = self.world.nodes + self.world.spares
        rate = self.world.failures * held / 86_400_000.0
        return self.random.expovariate(rate) if rate else float("inf")

    def _do_fail(self) -> None:
        self._later(self._gap(), "fail")
        kind = self.random.choices(list(MIX), list(MIX.values()))[0]
        if self.random.random() * self.named >= len(self.state.nodes.usable):
            return  # it befell a node that this job has given back
        spares = [node for node in self.state.nodes.usable if node not in self.state.launch.nodes]
        idle = len(spares) if self.state.launch.nodes else 0
        hits_spare = self.random.random() < idle / (self.world.nodes + idle)
        among = spares if hits_spare else [node for node in self.state.nodes.usable if node not in spares or not idle]
        alive = [node for node in among if node not in self.dead]
        if not alive or (kind is Kind.FAILURE and (hits_spare or not self.state.launch.running)):
            return  # nothing runs there that could fail
        node = self.random.choice(alive)
        self.result.happened[kind] += 1
        if not hits_spare:
            self.result.hits += 1
            self._break(kind)
        self.incidents += 1
        match kind:
            case Kind.FAULT:
                seen = on.NodeFaulted(
                    at=0, node=node, incident=f"i{self.incidents}", name="XID 79", action="drain_reboot", leave=True,
                    why="simulated", drained=True,
                )  # fmt: skip
                self._later(self.world.detect_s, seen)
            case Kind.LOST:
                self.dead.add(node)
                lost = on.WatcherLost(at=0, node=node, bus=self.state.watchers.bus, why="silent")
                self._later(self.world.silence_s, lost)
            case _:
                exited = on.RankExited(at=0, launch=self.state.launch.number, rank=0, node=node, code=1)
                self._later(self.world.detect_s, exited, launch=self.serial)

    def _break(self, kind: Kind) -> None:
        """No further step comes; what is not durable is lost."""
        if self.hurt is None and self.state.launch.running:
            self.hurt = kind
            self._pause()
            self._lose()
            self._spend(Use.HUNG)

    def _do_preempt(self) -> None:
        self.result.happened[Kind.PREEMPTION] += 1
        self.facts |= {"preempt": self.now, "end": self.now + self.world.grace_s}
        self._feed(on.SignalReceived(at=self.now, signal="TERM"))

    def _do_limit(self) -> None:
        self.result.happened[Kind.TIME_LIMIT] += 1
        self._feed(on.SignalReceived(at=self.now, signal="USR1"))

    # --- training ---------------------------------------------------------------------------------

    def _do_first_step(self) -> None:
        if self.hurt is None:
            self._go_on()
            self._feed(on.Progressed(at=self.now, launch=self.state.launch.number, step=self._step() + 1, tokens=0))

    def _step(self) -> int:
        return int(self.progress.done.steps_s)

    def _go_on(self) -> None:
        self._spend(Use.PRODUCTIVE)
        self.progress.go_on(self.now, len(self.state.launch.nodes) / self.named)
        self._later(self.world.interval_s, "save", launch=self.serial)

    def _pause(self) -> None:
        self.progress.pause(self.now)

    def _lose(self) -> None:
        self.accounts.lost(self.progress.lose())

    def _do_save(self) -> None:
        if self.hurt is not None or not self.progress.stepping:
            return
        self._pause()
        self._begin_save(emergency=False)
        self._spend(Use.SAVING)
        self._later(self.world.blocked_s, "go_on", launch=self.serial)

    def _do_go_on(self) -> None:
        if self.hurt is None and self.accounts.use is Use.SAVING and self.state.phase is not Phase.SAVING:
            self._go_on()

    def _begin_save(self, *, emergency: bool) -> None:
        step, save_id = self.progress.snapshot(), f"s{self.result.saves}"
        began = on.SaveBegan(at=0, launch=self.state.launch.number, step=step, save_id=save_id, emergency=emergency)
        self._later(0.0, began, launch=self.serial)
        self._later(self.world.persist_s, "commit", launch=self.serial)

    def _do_commit(self) -> None:
        step = self.progress.commit()
        if step is None:
            return
        emergency = self.state.phase is Phase.SAVING and not self.progress.saving
        self.result.saves += 1
        launch = self.state.launch.number
        self._feed(
            on.CheckpointCommitted(
                at=self.now, launch=launch, step=step, save_id="s", directory=f"step_{step:08d}", bytes=1,
                seconds=self.world.persist_s, emergency=emergency,
            )
        )  # fmt: skip
        if emergency:
            self._feed(on.TrainingStopped(at=self.now, launch=launch, step=step))
            self._spend(Use.STOPPING)
            self._later(self.world.stop_s, on.LaunchEnded(at=0, launch=launch, code=75, stopped=True))

    # --- orders -----------------------------------------------------------------------------------

    def _hold(self) -> None:
        self.accounts.held(self.now, 0 if self.over else len(self.state.nodes.usable))

    def _feed(self, event: on.Event) -> None:
        self._hold()
        before = self.state.phase
        decision = decide(self.state, event, self.policy)
        if self.listener is not None:
            self.listener(self.state, event, decision)
        self.state = decision.state
        if isinstance(event, on.LaunchEnded):
            self._pause()
            self._lose()
            self.struck, self.hurt = self.hurt, None
            self.serial += 1
        phase = self.state.phase
        if phase is not before and phase in (Phase.STARTING, Phase.STOPPING, Phase.CLOSING, Phase.REQUEUEING):
            self._pause()
            self._spend(Use.STARTING if phase is Phase.STARTING else Use.STOPPING)
        for effect in decision.effects:
            self._perform(effect)

    def _perform(self, effect: do.Effect) -> None:  # noqa: C901, PLR0912 - one case an effect
        world, state = self.world, self.state
        match effect:
            case do.StartBus():
                self._start_bus(effect)
            case do.StopBus():
                self._later(world.slurm_s, on.BusEnded(at=0, bus=state.watchers.bus, code=0))
            case do.ChooseCheckpoint():
                step, directory = self._newest()
                self._later(world.verify_s, on.CheckpointChosen(at=0, directory=directory, step=step or None))
            case do.TestStorage():
                self._later(world.slurm_s, on.StorageTested(at=0, ok=True))
            case do.VerifyCheckpoint():
                self._later(world.verify_s, on.CheckpointVerified(at=0, directory=effect.directory, ok=True))
            case do.ClearNodes():
                cleared = on.NodesCleared(
                    at=0, launch=effect.launch, nodes=effect.nodes, address=effect.first, port=1
                )  # fmt: skip
                self._later(world.clear_s, cleared)
            case do.AskUncleared():
                self._later(0.0, on.NodesNotCleared(at=0, launch=effect.launch, nodes=tuple(sorted(self.dead))))
            case do.StartLaunch():
                self._start_launch(effect)
            case do.RequestSave():
                self._request_save(effect)
            case do.KillRanks():
                self._pause()
                self._later(world.stop_s, on.LaunchEnded(at=0, launch=effect.launch, code=137), launch=self.serial)
            case do.JudgeLaunch():
                cause = CAUSES[self.struck] if self.struck is not None else Cause.UNKNOWN
                judged: dict[str, Any] = {
                    "launch": effect.launch,
                    "cause": cause,
                    "rule": "simulated",
                    "confidence": 1.0,
                }
                self._later(world.judge_s, on.Judged(at=0, **judged))
            case do.RollBack():
                self._roll_back()
            case do.ReleaseNodes():
                self._give_back(effect)
                self._later(world.slurm_s, on.NodesReleased(at=0, ok=True))
            case do.CheckNodes():
                self._later(world.slurm_s, on.NodesChecked(at=0, nodes=effect.nodes))
            case do.AskIdleNodes():
                idle = tuple(f"idle{index}" for index, at in enumerate(self.repaired_at) if at <= self.now)
                self._later(world.slurm_s, on.IdleNodes(at=0, nodes=idle))
            case do.AskSlurm():
                self._later(world.slurm_s, on.SlurmAnswered(at=0, job=self._job()))
            case do.Requeue():
                again = 2 if effect.resubmit else None
                self._later(world.slurm_s, on.RequeueAnswered(at=0, ok=True, job_id=again))
            case do.Exit():
                self._exit(effect)
            case _:
                pass  # a look of the agent's, a call for a person: nothing comes back

    def _start_bus(self, effect: do.StartBus) -> None:
        after = effect.after_s + self.world.bus_s
        if self.dead.intersection(effect.nodes):  # a lost node keeps the whole Slurm step from starting
            self._later(after, on.BusEnded(at=0, bus=effect.bus, code=1, error="node down"))
            return
        for node in effect.nodes:
            self._later(after, on.WatcherReady(at=0, node=node, bus=effect.bus))

    def _start_launch(self, effect: do.StartLaunch) -> None:
        self.serial += 1
        self.hurt = None
        self.result.launches += 1
        self._spend(Use.STARTING)
        self._later(1.0, on.LaunchBegan(at=0, launch=effect.launch), launch=self.serial)
        hello = on.RankHello(at=0, launch=effect.launch, rank=0, node=effect.nodes[0])
        self._later(self.world.load_s / 2, hello, launch=self.serial)
        self._later(self.world.load_s, "first_step", launch=self.serial)

    def _request_save(self, effect: do.RequestSave) -> None:
        if self.hurt is not None:
            return  # the ranks cannot any more
        if effect.stop:
            self._pause()
            self._spend(Use.SAVING)
        if effect.stop or not self.progress.saving:
            self.progress.note(self.now)  # the snapshot holds what is done by now
            self._begin_save(emergency=effect.stop)

    def _give_back(self, effect: do.ReleaseNodes) -> None:
        """Nodes go to be repaired, each for its own time; where the job runs with fewer, they could come back."""
        gone = set(self.state.nodes.allocated) - set(effect.keep) - self.left
        self.left |= gone
        for _ in gone:
            wait = self.random.expovariate(1 / self.world.repair_s) if self.world.repair_s else 0.0
            self.repaired_at.append(self.now + wait)

    def _roll_back(self) -> None:
        self.accounts.lost(self.progress.roll_back())
        step, directory = self._newest()
        self._later(
            self.world.slurm_s, on.RolledBack(at=0, launch=self.state.launch.number, directory=directory, step=step)
        )

    def _newest(self) -> tuple[int, str | None]:
        step = self.progress.newest
        return step, f"step_{step:08d}" if step else None

    def _job(self) -> on.JobFacts:
        end = self.facts.get("end", float("inf"))
        return on.JobFacts(
            state=on.JobState.RUNNING,
            slurm_state="RUNNING",
            restarts=self.state.identity.restart_count,
            preempt_at=self.facts.get("preempt"),
            end_at=end if end < float("inf") else None,
        )

    def _exit(self, effect: do.Exit) -> None:
        self.over = True
        self._pause()
        self._lose()
        self._spend(Use.QUEUE)
        wait = self.random.expovariate(1 / self.world.queue_s) if self.world.queue_s else 0.0
        if effect.code != ExitCode.REQUEUED:
            self.result.persons += 1
            self.result.stopped_for.append(text(effect.reasons))
            wait += self.world.person_s
            self.state = State()  # submitted again by hand: nothing is carried over but the checkpoints
        self.now += wait


# --- many runs of one kind: the mean, how far they spread, and what the formula of `stepkeeper plan` says ------------


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
