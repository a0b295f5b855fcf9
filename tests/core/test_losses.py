"""Which losses are wrong, by a run's own history."""

from __future__ import annotations

import math
import random

import msgspec
import pytest

from stepkeeper.core import anomalies
from stepkeeper.core import events as on
from stepkeeper.core.decide import decide
from stepkeeper.core.losses import (
    DISCONTINUITY,
    NOT_FINITE,
    SPIKE,
    Losses,
    carried,
    launched,
    observe,
)
from stepkeeper.core.phases import Decision
from stepkeeper.core.policy import Policy
from stepkeeper.core.reasons import LossWrong, PartFailed
from stepkeeper.core.state import State

POLICY = Policy()


def curve(steps: int, *, seed: int = 0) -> list[float]:
    """Return losses as a language model has them: falling, and noisy."""
    noise = random.Random(seed)  # noqa: S311 - noise, and the same each time
    return [2.0 + 8.0 * math.exp(-step / 50) * (1 + noise.gauss(0, 0.05)) for step in range(steps)]


def played(values: list[float | None], losses: Losses | None = None, first: int = 1) -> tuple[Losses, list[LossWrong]]:
    losses, found = losses or Losses(), []
    for step, loss in enumerate(values, first):
        losses, anomaly = observe(losses, step, loss, POLICY)
        found += [anomaly] if anomaly is not None else []
    return losses, found


@pytest.mark.parametrize("seed", range(5))
def test_an_ordinary_curve_is_nothing(seed: int) -> None:
    assert played(curve(2000, seed=seed))[1] == []


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_a_loss_that_stays_no_number_is_told_once(wrong: float) -> None:
    (anomaly,) = played([*curve(10), *[wrong] * 50])[1]

    assert (anomaly.rule, anomaly.step) == (NOT_FINITE, 11)
    assert (anomaly.step, anomaly.loss) == (11, None)


def test_a_single_one_passes() -> None:
    assert played([*curve(300), math.nan, *curve(300)[-20:], 50.0, *curve(300)[-20:]])[1] == []


def test_a_jump_that_stays_is_a_spike_and_then_the_usual() -> None:
    losses, found = played([*curve(300), *[9.0] * 300])

    assert [(each.rule, each.step) for each in found] == [(SPIKE, 301)]
    assert played([9.1] * 20, losses, 601)[1] == [], "it is the usual level by now"
    assert [each.rule for each in played([50.0] * 20, losses, 601)[1]] == [SPIKE], "and the next jump is one again"


def test_a_jump_right_after_a_resume_is_named_so() -> None:
    losses, _ = played(curve(300))
    resumed = launched(losses, 250)

    (anomaly,) = played([7.0] * 10, resumed, 251)[1]

    assert (anomaly.rule, anomaly.step) == (DISCONTINUITY, 251)
    assert played(curve(300)[250:], resumed, 251)[1] == [], "one that goes on as before is none"


def test_a_jump_right_after_a_requeue_is_named_so_too() -> None:
    known = tuple(enumerate(curve(900)[::12], 1))
    started = on.AttemptStarted(
        at=0, job_id=7, restart_count=1, attempt=1, nodes=("a",), batch_node="a", kill_wait_s=30.0, losses=known
    )

    state = decide(State(), started, POLICY).state
    (anomaly,) = played([7.0] * 10, launched(state.losses, 60), 61)[1]

    assert (anomaly.rule, anomaly.step) == (DISCONTINUITY, 61)
    assert [step for step, _ in launched(state.losses, 60).recent] == list(range(1, 61)), "the rest did not happen"
    assert carried(((1, math.inf), (2, -1.0), (3, 1.0))).recent == ((3, 0.0),)


def test_a_jump_long_after_a_resume_is_a_spike() -> None:
    losses, _ = played(curve(300))

    assert [each.rule for each in played([*[2.0] * 60, *[7.0] * 10], launched(losses, 250), 251)[1]] == [SPIKE]


def test_what_was_rolled_back_is_no_history() -> None:
    losses, _ = played([*curve(300), *[9.0] * 300])

    assert max(step for step, _ in launched(losses, 480).recent) == 480
    assert launched(losses, None) == Losses()


def test_losses_without_a_logarithm_and_steps_without_a_loss_are_left_alone() -> None:
    losses, found = played([-3.0, 0.0, None] * 40)

    assert found == []
    assert losses.recent == ()


def test_a_decision_tells_which_rule_a_loss_broke() -> None:
    losses, spikes = played([*curve(300), *[9.0] * 30])
    _, resumed = played([7.0] * 10, launched(losses, 250), 251)
    _, none = played([math.nan] * 10)

    assert [each.rule for each in (*spikes, *resumed, *none)] == [SPIKE, DISCONTINUITY, NOT_FINITE]
    assert [each.loss for each in (*spikes, *resumed, *none)] == [9.0, 7.0, None]


def test_a_mistake_of_an_observer_is_reported_and_it_begins_afresh():
    """Whatever the ranks say, the training goes on: no observer is needed for it."""

    @anomalies.observer(lambda state: msgspec.structs.replace(state, losses=Losses()))
    def watch(state: State, number: float) -> Decision:
        return Decision(msgspec.structs.replace(state, losses=Losses(count=round(1 / number))))

    state = watch(State(), 0.5).state
    decision = watch(state, 0.0)

    assert state.losses.count == 2
    assert decision.state.losses == Losses()
    assert decision.why == (PartFailed(part="watch", error="ZeroDivisionError: float division by zero"),)


def test_the_smallest_and_the_largest_losses_are_numbers_like_others():
    replayed = on.Replayed(at=1.0, launch=0, step=1, steps=1, worst=1, then=1e308, now=5e-324, deterministic=False)

    decision = anomalies.on_replayed(State(), replayed, POLICY)

    assert [type(reason).__name__ for reason in decision.why] == ["ReplayDiffers"]
