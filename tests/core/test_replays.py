"""How far the losses of steps that are done again may be from the first ones, by the run's own spread."""

from __future__ import annotations

import math

import pytest

from stepkeeper.core import effects as do
from stepkeeper.core.decide import decide
from stepkeeper.core.losses import ENOUGH
from stepkeeper.core.policy import Policy
from stepkeeper.core.state import State
from stepkeeper.simulate.scenario import given_training, parse

POLICY = Policy()


def trained(*losses: float) -> State:
    """A launch that resumed, and heard these losses in the one before."""
    state = given_training()
    for step, loss in enumerate(losses, start=1):
        state = decide(state, parse(f"{step} Progressed step={step} loss={loss!r}", state), POLICY).state
    return state


def equal(state: State, then: float, now: float) -> bool:
    event = parse(f"100 Replayed worst=20 then={then!r} now={now!r}", state)
    (told,) = decide(state, event, POLICY).effects
    assert isinstance(told, do.ReportReplay)
    return told.equal


def test_a_noisy_run_may_differ_by_a_share_of_what_its_steps_differ_by() -> None:
    noisy = trained(*[2.0 * (1.3 if step % 2 else 1.0) for step in range(ENOUGH + 5)])

    assert equal(noisy, 2.0, 2.0 * 1.2)
    assert not equal(noisy, 2.0, 2.0 * 1.25)


def test_a_smooth_run_may_differ_by_what_the_policy_allows() -> None:
    smooth = trained(*[2.0] * (ENOUGH + 5))

    assert equal(smooth, 2.0, 2.0 * 1.019)
    assert not equal(smooth, 2.0, 2.0 * 1.021)


def test_before_enough_is_known_a_jump_counts_as_the_loss_watch_has_it() -> None:
    young = trained(*[2.0] * (ENOUGH - 1))

    assert equal(young, 2.0, 2.0 * (POLICY.loss_times - 0.01))
    assert not equal(young, 2.0, 2.0 * (POLICY.loss_times + 0.01))


@pytest.mark.parametrize("now", [0.0, -1.0])
def test_losses_without_a_logarithm_are_compared_as_they_are(now: float) -> None:
    young = trained(2.0)

    assert not equal(young, 2.0, now)
    assert equal(young, now, now + math.log(POLICY.loss_times) / 2)
