"""A long day: the loss jumps, then a node becomes slow, and a spare takes its place; on a real Slurm."""

from __future__ import annotations

from pathlib import Path

import pytest

from stepkeeper.core import effects as do
from stepkeeper.core import events as on
from stepkeeper.core.causes import Cause
from tests.lab import Lab
from tests.stories.test_failures import causes, failing
from tests.training import Training

pytestmark = [pytest.mark.slurm, pytest.mark.campaign, pytest.mark.timeout(900)]
STEP_SECONDS = 0.4
SPIKE_AT = 115  # a launch has a pace, and losses that are usual, after 33 words, of which there is one a second
OPTIONS = (
    "--spares=1",
    *("--set", "policy.slow_node=replace", "--set", "policy.slow_node_for_s=20", "--set", "policy.slow_node_times=3"),
    *("--set", "policy.loss_spike=rollback", "--set", "policy.loss_words=2"),
)


def slow_down(training: Training, node: str) -> None:
    """Have every rank on a node wait for its data, from now on, whatever the launch: see `failing.py`."""
    path = Path(f"{training.run_dir}.slow")
    path.write_text(node)
    path.chmod(0o644)


def told(training: Training, kind: type) -> list:
    return [effect for record in training.records() for effect in record.effects if isinstance(effect, kind)]


def test_a_jump_is_led_back_from_a_slow_launch_is_told_and_a_slow_node_replaced(lab: Lab) -> None:
    """The words name the node that is really slow: its ranks wait for data, and all others wait for them."""
    training = failing(
        lab, "spike", step=SPIKE_AT, rank=0, nodes=3, steps=4000, step_seconds=STEP_SECONDS, run_args=OPTIONS
    )
    training.until(training.launches, "the first launch")
    (first,) = training.launches()
    slow = next(node for node in first if node != lab.job(training.job_id).batch_host)
    training.until(lambda: len(training.launches()) > 1, "the launch after the jump", timeout_s=240)
    slow_down(training, slow)
    training.until(lambda: len(training.launches()) > 2, "the spare's launch", timeout_s=300)
    began = len(training.events(on.Progressed))
    training.wait_event(on.Progressed, count=began + 1)
    lab.cancel(training.job_id, user=training.user)
    training.wait_end()

    judged = [record.event for record in training.events(on.Judged)]
    assert [(each.cause, each.rule) for each in judged[:1]] == [(Cause.NUMERICAL, "loss-spike")], training.story()
    assert judged[0].step in range(SPIKE_AT, SPIKE_AT + 30), "words are of the newest step"
    chosen = [record.event.step for record in training.events(on.CheckpointChosen)]
    assert chosen[1] in (100, 110), training.story()
    (slower,) = told(training, do.TellSlowLaunch)
    assert set(slower.nodes) <= {slow}, "nodes are compared over longer than it takes to see that a launch is slow"
    assert slower.seconds > 1.5 * slower.usual
    named = [each for each in told(training, do.TellSlowNode) if not each.over]
    assert [each.node for each in named] == [slow], training.story()
    assert f"{slow} is slow: its ranks work" in training.output()
    assert "this launch steps slower than those before it" in training.output()
    launches = training.launches()
    assert launches[:2] == [first, first], training.story()
    assert slow not in launches[2]
    assert len(launches[2]) == len(first), "the spare took its place"
    assert causes(training) == [Cause.NUMERICAL], "a slow node is no failure"
