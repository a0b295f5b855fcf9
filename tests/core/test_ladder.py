"""What causes lead to: rows of the policy, and the budgets that end every loop."""

from __future__ import annotations

import msgspec
import pytest

from stepkeeper.core import effects as do
from stepkeeper.core import events as on
from stepkeeper.core.causes import Cause, LadderError, Rung, parse_ladder
from stepkeeper.core.decide import decide
from stepkeeper.core.exits import ExitCode
from stepkeeper.core.policy import Policy
from stepkeeper.core.state import Phase, State

POLICY = Policy()
LAUNCHES_MAX = 40
ROWS = [cause for cause in Cause if hasattr(POLICY, f"on_{cause.value}")]


class World:
    """A run whose launches all fail in the same way; a requeued job comes back as the next attempt."""

    unseen_s = 0.0  # how long a launch without the trainer library runs; 0: it has it, and fails at once
    places = ("",)  # the failures, in turn
    snapshot: int | None = None  # that the nodes hold in memory
    nodes_wanted = 2  # of three

    def __init__(self, cause: Cause, *, step: int | None, checkpoint: int | None, policy: Policy = POLICY) -> None:
        self.cause, self.step, self.checkpoint, self.policy = cause, step, checkpoint, policy
        self.orders: list[do.Effect] = []
        self.at = 0.0
        self.state = State()
        self.attempts = 0
        self.code: int | None = None

    def play(self) -> World:
        """Run until the supervisor ends for good."""
        while self.code in (None, ExitCode.REQUEUED):
            assert self.count(do.StartLaunch) <= LAUNCHES_MAX, f"{self.cause}: no budget ends this"
            self._attempt()
        return self

    def count(self, kind: type) -> int:
        return sum(isinstance(order, kind) for order in self.orders)

    def _attempt(self) -> None:
        before, self.state, self.code = self.state.budgets, State(), None
        start = on.AttemptStarted(
            at=self.at, job_id=7, restart_count=0, attempt=self.attempts, nodes=("a", "b", "c"), batch_node="a",
            kill_wait_s=30.0, nodes_wanted=self.nodes_wanted, failures=before.failures, tried=before.tried,
            best_step=before.best_step, node_losses=before.node_losses,
        )  # fmt: skip
        self.attempts += 1
        due: list[on.Event] = [start]
        while self.code is None:
            self.at += 1.0
            deadline = self.state.deadline_at
            if not due:
                assert deadline is not None, f"{self.state.phase}: it waits for ever"
                self.at = max(self.at, deadline)
                due = [on.Tick(at=self.at)]
            event = due.pop(0)
            if isinstance(event, on.LaunchEnded):
                self.at += self.unseen_s
            decision = decide(self.state, msgspec.structs.replace(event, at=self.at), self.policy)
            self.state = decision.state
            self.orders += decision.effects
            for effect in decision.effects:
                due += self.answers(effect)

    def answers(self, effect: do.Effect) -> list[on.Event]:  # noqa: C901 - one case an effect
        launch = self.state.launch.number
        match effect:
            case do.StartBus():
                return [on.WatcherReady(at=0, node=node, bus=effect.bus) for node in effect.nodes]
            case do.ChooseCheckpoint():
                step = self.checkpoint
                return [on.CheckpointChosen(at=0, directory=step and f"step_{step}", step=step)]
            case do.RollBack():
                self.checkpoint = effect.below_step // 2 or None
                return [on.RolledBack(at=0, launch=launch, directory="older", step=self.checkpoint)]
            case do.ClearNodes():
                return [on.NodesCleared(at=0, launch=launch, address="a", port=1)]
            case do.StartLaunch():
                hello: on.Event = on.RankHello(at=0, launch=launch, rank=0, node="a")
                if self.snapshot is not None and not self.state.resume.went_back:
                    hello = on.RankHello(
                        at=0, launch=launch, rank=0, node="a", resumed_step=self.snapshot, in_memory=True
                    )
                if self.unseen_s:
                    hello = on.LaunchBegan(at=0, launch=launch)
                return [hello, on.LaunchEnded(at=0, launch=launch, code=1)]
            case do.JudgeLaunch():
                return [
                    on.Judged(
                        at=0,
                        launch=effect.launch,
                        cause=self.cause,
                        rule="r",
                        confidence=0.9,
                        step=self.step,
                        node="b",
                        location=self.places[effect.launch % len(self.places)],
                    )
                ]
            case do.AskSlurm():
                job = on.JobFacts(state=on.JobState.RUNNING, slurm_state="RUNNING", restarts=0, end_at=1e9)
                return [on.SlurmAnswered(at=0, job=job)]
            case do.Requeue():
                return [on.RequeueAnswered(at=0, ok=True)]
            case do.StopBus():
                return [on.BusEnded(at=0, bus=self.state.watchers.bus, code=0)]
            case do.Exit():
                assert self.state.phase is Phase.DONE
                self.code = effect.code
        return []


@pytest.mark.parametrize("checkpoint", [None, 800])
@pytest.mark.parametrize("step", [None, 950])
@pytest.mark.parametrize("cause", Cause)
def test_whatever_fails_for_ever_ends_and_calls_a_person_once(cause: Cause, step: int | None, checkpoint: int | None):
    world = World(cause, step=step, checkpoint=checkpoint).play()

    assert world.code in (ExitCode.CAUSE_STAYS, ExitCode.TRAINING_FAILED, ExitCode.NODES_LOST)
    assert world.count(do.NotifyUser) == 1
    assert world.count(do.StartLaunch) <= POLICY.node_losses_max + 2


@pytest.mark.parametrize("checkpoint", [None, 800])
@pytest.mark.parametrize("cause", [Cause.HANG, Cause.SEGFAULT])
def test_a_snapshot_that_fails_again_is_left_for_the_newest_step_directory(cause: Cause, checkpoint: int | None):
    """The snapshot of step 948 was tried, and no step directory was: none is left out."""
    world = World(cause, step=950, checkpoint=checkpoint)
    world.snapshot = 948

    world.play()

    went_back = [each.went_back for each in world.orders if isinstance(each, do.StartLaunch)]
    assert went_back[:3] == [None, None, True], "the third launch must not find it again"
    assert world.count(do.RollBack) == 0


@pytest.mark.parametrize("cause", [Cause.EXCEPTION, Cause.UNKNOWN, Cause.GPU_MEMORY, Cause.SEGFAULT])
def test_the_same_failure_after_an_hour_unseen_ends_the_run_at_the_third_launch(cause: Cause):
    """A script without the trainer library, whose launches run for more than an hour: nothing is ever verified."""
    world = World(cause, step=None, checkpoint=None)
    world.unseen_s = POLICY.unseen_progress_s + 60.0

    world.play()

    assert (world.code, world.count(do.StartLaunch)) == (ExitCode.TRAINING_FAILED, POLICY.failures_max)
    assert world.count(do.NotifyUser) == 1


def test_storage_that_fails_each_hour_unseen_ends_the_run_when_its_row_is_through():
    """A disk that is full each time a script without the trainer library writes."""
    world = World(Cause.STORAGE, step=None, checkpoint=None)
    world.unseen_s = POLICY.unseen_progress_s + 60.0

    world.play()

    assert (world.code, world.count(do.StartLaunch)) == (ExitCode.TRAINING_FAILED, len(POLICY.row(Cause.STORAGE)))
    assert world.count(do.NotifyUser) == 1


@pytest.mark.parametrize("cause", [Cause.EXCEPTION, Cause.UNKNOWN, Cause.GPU_MEMORY, Cause.SEGFAULT])
def test_hours_without_a_newer_checkpoint_of_a_framework_are_not_unseen(cause: Cause):
    """Its checkpoints tell of progress: failures in the same way go along their row, as with the library."""
    seen, unseen = World(cause, step=None, checkpoint=800), World(cause, step=None, checkpoint=800)
    unseen.unseen_s = POLICY.unseen_progress_s + 60.0

    seen.play()
    unseen.play()

    assert (unseen.code, unseen.count(do.StartLaunch)) == (seen.code, seen.count(do.StartLaunch))
    assert unseen.count(do.StartLaunch) <= POLICY.failures_max


def test_other_failures_after_an_hour_unseen_are_no_lack_of_progress():
    """Two ways to fail, in turn: each ends the run at its own third time."""
    world = World(Cause.EXCEPTION, step=None, checkpoint=None)
    world.unseen_s, world.places = POLICY.unseen_progress_s + 60.0, ("a.py:1", "b.py:2")

    world.play()

    assert (world.code, world.count(do.StartLaunch)) == (ExitCode.TRAINING_FAILED, 2 * POLICY.failures_max - 1)


@pytest.mark.parametrize("cause", ROWS)
@pytest.mark.parametrize("word", [rung.value for rung in Rung])
def test_no_row_that_a_user_writes_runs_for_ever(cause: Cause, word: str):
    policy = msgspec.structs.replace(POLICY, **{f"on_{cause.value}": word})

    world = World(cause, step=950, checkpoint=800, policy=policy).play()

    assert world.count(do.StartLaunch) <= POLICY.node_losses_max + 2


@pytest.mark.parametrize(
    ("cause", "launches"),
    [
        (Cause.CONFIGURATION, 1),
        (Cause.VERSION_MISMATCH, 1),
        (Cause.EXCEPTION, 2),
        (Cause.GPU_MEMORY, 2),
        (Cause.NUMERICAL, 2),
        (Cause.CHECKPOINT, 2),
        (Cause.NETWORK, 3),
        (Cause.UNKNOWN, 3),
        (Cause.STORAGE, 5),
    ],
)
def test_each_cause_has_its_number_of_launches(cause: Cause, launches: int):
    world = World(cause, step=None, checkpoint=None).play()

    assert world.count(do.StartLaunch) == launches


@pytest.mark.parametrize("cause", [Cause.HOST_MEMORY, Cause.SEGFAULT])
def test_where_no_node_can_be_left_the_launch_is_tried_as_often(cause: Cause):
    """Ranks that were killed twice before the first checkpoint are no proof that the third launch would end so."""
    world = World(cause, step=None, checkpoint=None)
    world.nodes_wanted = 3

    world.play()

    assert (world.code, world.count(do.StartLaunch)) == (ExitCode.TRAINING_FAILED, POLICY.failures_max)


def test_at_the_same_step_twice_it_goes_one_checkpoint_back_and_then_stops():
    policy = msgspec.structs.replace(POLICY, failures_max=9)

    world = World(Cause.UNKNOWN, step=950, checkpoint=800, policy=policy).play()

    assert [order.below_step for order in world.orders if isinstance(order, do.RollBack)] == [800]
    assert world.code == ExitCode.CAUSE_STAYS
    assert world.count(do.StartLaunch) == 3


def test_the_defaults_can_be_read_and_every_row_names_a_cause():
    named = [field.removeprefix("on_") for field in Policy.__struct_fields__ if field.startswith("on_")]

    assert {Cause(name) for name in named} == set(ROWS)
    for cause in Cause:
        assert POLICY.row(cause)


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("", "one of"),
        ("reboot", "`reboot`"),
        ("relaunch; stop", "relaunch; stop"),
        ("stop, relaunch", "nothing comes after"),
        ("requeue after 5 s", "does not wait"),
        ("relaunch after -5 s", "relaunch after -5 s"),
        (", ".join(["relaunch"] * 21), "at most 20"),
    ],
)
def test_a_row_that_cannot_be_read_says_what_is_wrong(text: str, wrong: str):
    with pytest.raises(LadderError, match=wrong):
        parse_ladder(text)


def test_storage_that_fails_at_ever_other_places_is_bounded_too():
    world = World(Cause.STORAGE, step=None, checkpoint=None)
    _elsewhere_each_time(world)

    world.play()

    assert world.count(do.StartLaunch) == len(POLICY.row(Cause.STORAGE))


def test_only_the_newest_ways_to_fail_are_remembered():
    policy = msgspec.structs.replace(POLICY, failures_max=30)
    world = World(Cause.EXCEPTION, step=None, checkpoint=None, policy=policy)
    _elsewhere_each_time(world)

    world.play()

    assert world.count(do.StartLaunch) == 30
    assert len(world.state.budgets.tried) == 16


@pytest.mark.parametrize("cause", [Cause.SEGFAULT, Cause.HANG, Cause.COLLECTIVE_TIMEOUT, Cause.HOST_MEMORY])
def test_a_failure_that_another_rule_recognises_is_the_same_failure(cause: Cause):
    """A rank's log may come too late: then the signal says what it was."""
    one_rule, other_rules = World(cause, step=7, checkpoint=5), World(cause, step=7, checkpoint=5)
    _elsewhere_each_time(other_rules)

    one_rule.play()
    other_rules.play()

    assert (other_rules.code, other_rules.count(do.StartLaunch)) == (one_rule.code, one_rule.count(do.StartLaunch))
    assert other_rules.count(do.RollBack) == one_rule.count(do.RollBack)


def _elsewhere_each_time(world: World) -> None:
    answers = world.answers
    world.answers = lambda effect: [
        msgspec.structs.replace(each, rule=f"r{world.at}") if isinstance(each, on.Judged) else each
        for each in answers(effect)
    ]
