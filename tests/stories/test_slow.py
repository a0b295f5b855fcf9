"""The loss jumps, and is led back from; then a launch steps slower than the one before: on a real Slurm."""

from __future__ import annotations

from pathlib import Path

import pytest

from stepkeeper.core import effects as do
from stepkeeper.core import events as on
from stepkeeper.core.causes import Cause
from tests.lab import Lab
from tests.stories.test_failures import failing
from tests.training import Training

pytestmark = [pytest.mark.slurm, pytest.mark.campaign, pytest.mark.timeout(900)]
STEP_SECONDS = 0.4
SPIKE_AT = 115  # a launch has a pace, and losses that are usual, after 33 words, of which there is one a second
OPTIONS = ("--set", "policy.loss_spike=rollback", "--set", "policy.loss_words=2")


def slow_down(training: Training, node: str) -> None:
    """Have every rank on a node wait for its data, from now on, whatever the launch: see `failing.py`."""
    path = Path(f"{training.run_dir}.slow")
    path.write_text(node)
    path.chmod(0o644)


def told(training: Training, kind: type) -> list:
    return [effect for record in training.records() for effect in record.effects if isinstance(effect, kind)]


def test_a_jump_is_led_back_from_and_a_slow_launch_is_told(lab: Lab) -> None:
    """In the launch after the jump the data of one node comes late, and all others wait for it."""
    training = failing(lab, "spike", step=SPIKE_AT, rank=0, steps=4000, step_seconds=STEP_SECONDS, run_args=OPTIONS)
    training.until(training.launches, "the first launch")
    slow = next(node for node in training.launches()[0] if node != lab.job(training.job_id).batch_host)
    training.until(lambda: len(training.launches()) > 1, "the launch after the jump", timeout_s=240)
    slow_down(training, slow)
    training.until(lambda: told(training, do.TellSlowLaunch), "the word on the slow launch", timeout_s=240)
    lab.cancel(training.job_id, user=training.user)
    training.wait_end()

    said = training.events(on.Judged)[0].event
    assert (said.cause, said.rule) == (Cause.NUMERICAL, "loss-spike"), training.story()
    assert said.step in range(SPIKE_AT, SPIKE_AT + 30), "words are of the newest step"
    chosen = [record.event.step for record in training.events(on.CheckpointChosen)]
    assert chosen[1] in (100, 110), training.story()
    (slower,) = told(training, do.TellSlowLaunch)
    assert slower.seconds > 1.5 * slower.usual, training.story()
    assert "this launch steps slower than those before it" in training.output()
