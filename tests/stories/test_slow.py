"""What slows a training down is named: late data, a launch, a node that a spare replaces; on a real Slurm."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from stepkeeper.core import effects as do
from stepkeeper.core import events as on
from stepkeeper.core.causes import Cause
from tests.lab import Lab
from tests.stories.test_failures import failing
from tests.stories.throttling import require, throttled
from tests.training import SMALL, Training, assert_complete, assert_replays

pytestmark = [pytest.mark.slurm, pytest.mark.campaign, pytest.mark.timeout(900)]
STEP_SECONDS = 0.4
SPIKE_AT = 115  # a launch has a pace, and losses that are usual, after 33 words, of which there is one a second
REPLACE = ("--set", "policy.slow_node=replace")
SPIKES = ("--set", "policy.loss_spike=rollback")
UNHURRIED = Path(__file__).with_name("unhurried.py")
SHARE = 0.03  # of a processor, for a rank that needs some tens of milliseconds of it for a step
WITHIN_S = 420.0  # a node is slow for two minutes before it counts as such


def slow_down(training: Training, node: str) -> None:
    """Have every rank on a node wait for its data, from now on, whatever the launch: see `failing.py`."""
    path = Path(f"{training.run_dir}.slow")
    path.write_text(node)
    path.chmod(0o644)


def told(training: Training, kind: type) -> list:
    return [effect for record in training.records() for effect in record.effects if isinstance(effect, kind)]


def test_a_jump_is_led_back_from_and_a_slow_launch_and_the_data_loader_that_is_why_are_told(lab: Lab) -> None:
    """In the launch after the jump the data of one node comes late, and all others wait for it, in `fully_shard`."""
    training = failing(
        lab, "spike", step=SPIKE_AT, rank=0, nodes=3, steps=4000, step_seconds=STEP_SECONDS,
        run_args=("--spares=1", *SPIKES, *REPLACE),
    )  # fmt: skip
    training.until(training.launches, "the first launch")
    slow = next(node for node in training.launches()[0] if node != lab.job(training.job_id).batch_host)
    training.until(lambda: len(training.launches()) > 1, "the launch after the jump", timeout_s=WITHIN_S)
    slow_down(training, slow)
    for kind in (do.ReportSlowLaunch, do.ReportSlowNode):
        training.until(
            lambda kind=kind: told(training, kind), f"{kind.__name__} of the slow launch", timeout_s=WITHIN_S
        )
    committed = len(training.events(on.CheckpointCommitted))
    training.wait_event(on.CheckpointCommitted, count=committed + 1)  # now a spare would take the place
    lab.cancel(training.job_id, user=training.user)
    training.wait_end()

    said = training.events(on.Judged)[0].event
    assert (said.cause, said.rule) == (Cause.NUMERICAL, "loss-spike"), training.story()
    assert said.step in range(SPIKE_AT, SPIKE_AT + 30), "words are of the newest step"
    chosen = [record.event.step for record in training.events(on.CheckpointChosen)]
    assert chosen[-1] in (100, 110), training.story()  # step 120 has the jump: it is found first, and rolled back from
    (slower,) = told(training, do.ReportSlowLaunch)
    assert slower.seconds > 1.5 * slower.baseline, training.story()
    assert slower.nodes == (slow,), slower
    assert "this launch steps slower than those before it" in training.output()
    (late,) = told(training, do.ReportSlowNode)
    assert (late.node, late.rank, late.loading) == (slow, training.launches()[1].index(slow), True), late
    assert f"the data loader of rank {late.rank} on {slow} is slow, not the node" in training.output()
    assert len(training.launches()) == 2, "the node was replaced"


def unhurried(lab: Lab, name: str, *run_args: str) -> tuple[Training, Path]:
    """Submit a training with a spare that rests after its steps, and the directory in which it may be told to hurry."""
    training = Training(lab, name=name, nodes=3, run_args=("--spares=1", *run_args))
    place = training.work / f"{name}-files"
    place.mkdir()
    shutil.copyfile(UNHURRIED, place / UNHURRIED.name)
    (place / UNHURRIED.name).chmod(0o644)
    place.chmod(0o777)
    training.command = (
        str(training.python), str(place / UNHURRIED.name), str(place / "hurry"), f"--steps={training.steps}",
        f"--seed={training.seed}", f"--checkpoint-every-steps={training.every}", *SMALL,
    )  # fmt: skip
    return training.submit(), place


def test_a_node_that_is_really_slow_is_replaced_by_a_spare_and_no_loss_shows_it(lab: Lab, reference: Training) -> None:
    """Its rank gets a thirtieth of a processor; the ranks' own words say so, and the others only wait for it."""
    require()
    training, place = unhurried(lab, "throttled", *REPLACE)
    told_pid = place / "rank-1"
    training.until(lambda: told_pid.exists() and told_pid.read_text(), "the rank's pid")
    first = training.launches()[0]
    with throttled(int(told_pid.read_text()), SHARE):
        training.until(lambda: told(training, do.ReportSlowNode), "the word on the slow node", timeout_s=WITHIN_S)
        (place / "hurry").touch()
        (place / "hurry").chmod(0o644)
        training.until(lambda: len(training.launches()) > 1, "the launch with the spare", timeout_s=WITHIN_S)
    training.wait_end(WITHIN_S)

    (named,) = told(training, do.ReportSlowNode)
    assert (named.node, named.rank, named.loading) == (first[1], 1, False), training.story()
    assert named.factor > 2, named
    assert f"{first[1]} is slow: rank 1 works" in training.output()
    second = training.launches()[1]
    (spare,) = set(second) - set(first)
    assert set(second) == {first[0], spare}, training.story()
    assert len(training.launches()) == 2
    assert training.events(on.Judged) == [], "a slow node is no failure"
    assert_complete(training, reference)
    assert_replays(training)
