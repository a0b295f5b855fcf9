"""Pauses that end by themselves, in histories of even steps: whatever they look like, nothing is ended."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepkeeper.core import effects as do
from stepkeeper.core import events as on
from stepkeeper.core.causes import Cause, Tried
from stepkeeper.core.decide import decide
from stepkeeper.core.policy import Policy
from stepkeeper.core.state import Phase, State, Timer
from stepkeeper.simulate.scenario import given_training
from stepkeeper.watcher.kernel import FOREVER_S

POLICY = Policy()
LOOK_S = 4.0  # how long it takes
LEAST_S = POLICY.hang_steady_s - LOOK_S  # a rank that polls for longer is taken for one that waits for ever


class Pause(msgspec.Struct, frozen=True):
    """What a rank does after some steps."""

    steps: int
    lasts_s: float
    how: str  # asleep: until an instant that is known; polls; computes; only sleeps: asks nobody in between


class Played(msgspec.Struct):
    """A training that is played step by step."""

    state: State
    at: float
    killed_at: float | None = None
    looks: int = 0

    def tell(self, event: on.Event) -> tuple[do.Effect, ...]:
        decision = decide(self.state, event, POLICY)
        self.state = decision.state
        if any(isinstance(each, do.KillRanks) for each in decision.effects):
            self.killed_at = event.at
        return decision.effects

    def step(self, number: int, seconds: float) -> None:
        self.at += seconds
        self.tell(on.Progressed(at=self.at, launch=0, step=number, tokens=1, step_seconds=seconds))

    def pause(self, pause: Pause) -> None:
        """Let the time pass: looks are answered after a while, if the pause still lasts then."""
        ends_at = self.at + pause.lasts_s
        while self.killed_at is None:
            due = self.state.timers.get(Timer.HANG)
            assert due is not None
            if due >= ends_at:
                return
            effects = self.tell(on.Tick(at=due))
            if any(isinstance(each, do.CollectStacks) for each in effects) and due + LOOK_S < ends_at:
                self.looks += 1
                self.tell(collected(due + LOOK_S, pause, ends_at - due - LOOK_S))


def collected(at: float, pause: Pause, left_s: float) -> on.StacksCollected:
    computes = pause.how == "computes"
    return on.StacksCollected(
        at=at,
        launch=0,
        moved=computes,
        idle=not computes,
        summary="",
        rank=1,
        node="b",
        sure_s=min(left_s, FOREVER_S) if pause.how == "asleep" else 0.0,
        awaited=pause.how == "only sleeps",
    )


def training() -> Played:
    return Played(given_training("given training step=900"), 10.0)


_pauses = st.builds(
    Pause,
    steps=st.integers(0, 80),
    lasts_s=st.floats(0.1, LEAST_S),
    how=st.sampled_from(("asleep", "polls", "computes")),
)


@settings(max_examples=60, deadline=None)
@given(st.floats(0.05, 4.0), st.lists(_pauses, max_size=6))
def test_a_pause_that_is_over_before_patience_is_ends_nothing(seconds: float, pauses: list[Pause]) -> None:
    played = training()
    number = 900
    for pause in pauses:
        for _ in range(pause.steps):
            number += 1
            played.step(number, seconds)
        played.pause(pause)
        number += 1
        played.step(number, pause.lasts_s + seconds)
        assert played.killed_at is None
        assert played.state.phase is Phase.TRAINING


def test_a_rank_that_sleeps_for_five_seconds_every_fifty_steps_is_left_alone() -> None:
    played = training()
    number = 900
    for round_ in range(20):
        for _ in range(50):
            number += 1
            played.step(number, 0.2)
        played.pause(Pause(0, 5.0, ("asleep", "polls")[round_ % 2]))
        number += 1
        played.step(number, 5.2)
    assert played.killed_at is None
    assert played.looks <= 1, "it is usual from then on"


@pytest.mark.parametrize(("seconds", "within_s"), [(0.2, 10.0), (0.5, 10.0), (2.0, 25.0)])
def test_a_rank_that_never_goes_on_ends_the_launch_after_one_look(seconds: float, within_s: float) -> None:
    played = training()
    for number in range(901, 941):
        played.step(number, seconds)
    begun = played.at

    played.pause(Pause(0, 1e9, "asleep"))

    assert played.killed_at is not None
    assert played.killed_at - begun <= within_s
    assert played.looks == 1


def after_steps(steps: int, seconds: float = 0.2) -> Played:
    played = training()
    for number in range(901, 901 + steps):
        played.step(number, seconds)
    return played


@pytest.mark.parametrize(("seconds", "within_s"), [(0.2, 10.0), (0.5, 10.0), (2.0, 25.0)])
def test_a_rank_that_only_sleeps_ends_an_even_launch_after_one_look(seconds: float, within_s: float) -> None:
    played = after_steps(40, seconds)
    begun = played.at

    played.pause(Pause(0, 1e9, "only sleeps"))

    assert played.killed_at is not None
    assert played.killed_at - begun <= within_s
    assert played.looks == 1


def test_the_first_steps_of_a_launch_do_not_tell_what_is_unusual() -> None:
    played = after_steps(30)
    played.pause(Pause(0, LEAST_S, "only sleeps"))
    assert played.looks
    assert played.killed_at is None


def test_a_pause_that_was_seen_before_is_not_looked_at() -> None:
    played = after_steps(40)
    played.step(941, 12.0)
    for number in range(942, 990):
        played.step(number, 0.2)
    played.pause(Pause(0, 17.0, "only sleeps"))
    assert not played.looks
    assert played.killed_at is None


def test_who_was_ended_for_it_and_has_not_progressed_since_gets_the_patience_of_before() -> None:
    """Whoever polls for something at the same step each time is ended once, and not until the run stops."""
    played = after_steps(40)
    tried = (Tried(cause=Cause.HANG, place="progress-silence", step=940),)
    played.state = msgspec.structs.replace(
        played.state, budgets=msgspec.structs.replace(played.state.budgets, tried=tried)
    )
    played.pause(Pause(0, LEAST_S, "only sleeps"))
    assert played.looks
    assert played.killed_at is None


def test_silence_counts_from_when_a_step_was_done_and_not_from_when_it_was_told() -> None:
    played = after_steps(40)
    due = played.state.timers.get(Timer.HANG)
    last = on.Progressed(at=played.at + 0.9, late_s=0.9, launch=0, step=941, tokens=1, step_seconds=0.2)
    played.tell(last)
    assert due is not None
    assert played.state.timers.get(Timer.HANG) == pytest.approx(due)


@pytest.mark.parametrize("saves", [(), (4.0,)], ids=["none is known", "one is known"])
def test_a_save_in_flight_puts_the_look_off_by_a_save(saves: tuple[float, ...]) -> None:
    played = after_steps(40)
    for seconds in saves:
        committed = on.CheckpointCommitted(
            at=played.at, launch=0, step=900, save_id="before", directory="step-900", bytes=1, seconds=seconds
        )
        played.tell(committed)
    played.tell(on.SaveBegan(at=played.at, launch=0, save_id="save", step=940))
    begun = played.at

    played.pause(Pause(0, 7.0 if saves else 100.0, "only sleeps"))
    assert played.looks == 0
    assert played.killed_at is None
    if saves:
        played.pause(Pause(0, 1e9, "only sleeps"))
        assert played.killed_at is not None
        assert played.killed_at - begun <= 15.0
