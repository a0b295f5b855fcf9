"""What holds for every history, however unlikely: the promises that cost a run when they are broken."""

from __future__ import annotations

import os
import subprocess
import sys

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import Phase as Generation
from hypothesis import strategies as st

from stepkeeper.core import effects as do
from stepkeeper.core import events as on
from stepkeeper.core.decide import decide
from stepkeeper.core.state import Phase, State
from tests.core.beginnings import (
    AGAIN,
    FAILED,
    FAILED_OFTEN,
    LEAVING,
    NODES_LEFT,
    NOT_READY,
    SHRUNK,
    SHRUNK_AND_FAILED,
    SHRUNK_TWICE,
    SLOW_SAVES,
    TOLD,
    TRAINING,
    UNSEEN,
)
from tests.core.histories import Turn, any_event, arbitrary, run
from tests.core.promises import GROWING, POLICY, assert_kept
from tests.core.realistic import NODES_FAIL, realistic

TICKS_MAX = 60  # from anywhere to DONE: some tries of a requeue, and a handful of phases before
CAMPAIGN = "STEPKEEPER_CAMPAIGN"
EXAMPLES = int(os.environ.get("STEPKEEPER_EXAMPLES", "200" if CAMPAIGN in os.environ else "30"))

histories = arbitrary() | realistic(POLICY)
check = settings(
    max_examples=EXAMPLES,
    deadline=None,
    phases=(
        Generation.explicit,
        Generation.generate,
    ),  # a history is shrunk for minutes, and is read turn by turn anyway
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@check
@given(realistic(POLICY, size_max=12, beginnings=(*LEAVING, *SLOW_SAVES)))
def test_they_hold_for_a_run_that_leaves(events):
    """Notices, cancels and the end cross each other here."""
    assert_kept(run(events, POLICY))


@check
@given(realistic(POLICY, size_max=12, beginnings=(*TRAINING, *NODES_LEFT, *NODES_LEFT), often=NODES_FAIL))
def test_they_hold_for_nodes_that_fail(events):
    """Lost, faulty and drained ones, spares and others."""
    assert_kept(run(events, POLICY))


@check
@given(realistic(POLICY, size_max=12, beginnings=(*FAILED, *FAILED_OFTEN, *UNSEEN, *NOT_READY)))
def test_they_hold_after_a_failure(events):
    """Why it failed, the newest checkpoint and the nodes are found out at the same time, in any order."""
    assert_kept(run(events, POLICY))


@check
@given(histories)
def test_all_promises_are_kept(events):
    """`decide` never raises either: playing the history is the proof."""
    assert_kept(run(events, POLICY))


@check
@given(realistic(POLICY, size_max=6, beginnings=TOLD))
def test_they_hold_where_something_else_is_told_at_the_same_time(events):
    """A second notice, the end of the work, a failure: while Slurm is asked."""
    assert_kept(run(events, POLICY))


@check
@given(realistic(POLICY, size_max=6, beginnings=AGAIN))
def test_they_hold_where_it_failed_in_the_same_way_again(events):
    """The rows of the ladder, at each place, and what comes behind them."""
    assert_kept(run(events, POLICY))


@check
@given(realistic(GROWING) | realistic(GROWING, beginnings=(SHRUNK, SHRUNK_TWICE, SHRUNK_AND_FAILED)))
def test_they_hold_for_a_run_that_grows_back(events):
    """It has more ways: nodes that come and go, saves that end no attempt, requeues that nobody asked for."""
    assert_kept(run(events, GROWING))


@check
@given(histories, st.sampled_from(("silence", "no answer", "refused", "cancelled")))
def test_the_passing_of_time_alone_ends_what_does_not_train(events, world):
    """Liveness: when nobody answers any more, the supervisor still leaves."""
    state = run(events, POLICY)[-1].after
    at = events[-1].at

    for _ in range(TICKS_MAX):
        away = world in ("silence", "no answer")  # a controller that is away ends no training
        if state.phase is Phase.DONE or (state.phase is Phase.TRAINING and (state.wake_at is None or away)):
            return
        at = max(at, state.wake_at)
        pending = [on.Tick(at=at)]
        while pending:
            decision = decide(state, pending.pop(0), POLICY)
            state = decision.state
            for effect in decision.effects:
                pending += _bad_answer(effect, at, world)

    pytest.fail(f"still {state.phase} after {TICKS_MAX} ticks")


def _bad_answer(effect: do.Effect, at: float, world: str) -> list[on.Event]:
    if isinstance(effect, do.Requeue) and world == "refused":
        return [on.RequeueAnswered(at=at, ok=False, error="refused")]
    if not isinstance(effect, do.AskSlurm) or world == "silence":
        return []
    if world == "no answer":
        return [on.SlurmAnswered(at=at, error="unreachable")]
    state = on.JobState.COMPLETING if world == "cancelled" else on.JobState.RUNNING
    return [on.SlurmAnswered(at=at, job=on.JobFacts(state=state, slurm_state="?", restarts=0))]


@check
@given(histories, any_event, st.integers(1, 3))
def test_words_of_older_launches_and_buses_change_nothing(events, event, age):
    """They arrive late, through buffers and pipes."""
    state = run(events, POLICY)[-1].after
    fields = type(event).__struct_fields__
    if "launch" in fields:
        before = isinstance(event, on.Judged)  # it tells of the launch before, at the time of the next one
        stale = msgspec.structs.replace(event, launch=state.launch.number - age - before)
    elif "bus" in fields:
        stale = msgspec.structs.replace(event, bus=state.watchers.bus - age)
    else:
        return

    decision = decide(state, stale, POLICY)

    assert decision == type(decision)(state)


def test_a_history_is_played_from_its_start():
    turns: list[Turn] = run([on.Tick(at=1.0)], POLICY)

    assert turns[0].after == State()


@pytest.mark.campaign
def test_they_hold_for_many_more_histories():
    """All of the above, with more examples than each run of the tests has time for."""
    line = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not campaign", __file__]
    done = subprocess.run(
        line, env=os.environ | {CAMPAIGN: "1"}, capture_output=True, text=True, timeout=500, check=False
    )

    assert done.returncode == 0, done.stdout[-20_000:]
