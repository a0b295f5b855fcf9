"""A spare below the switch of the node that it replaces takes that node's place among the ranks; on a real Slurm."""

from __future__ import annotations

import pytest

from stepkeeper.core import events as on
from tests.training import Training, assert_replays

pytestmark = pytest.mark.slurm


def assert_finished(training: Training) -> None:
    """Every step was done, in one attempt, and today's rules decide the journal again.

    Slurm keeps the job in COMPLETING for as long as it waits for the lost node.
    """
    training.until(lambda: training.exits() == [0], "the end of the training")
    assert sorted(training.losses()) == list(range(1, training.steps + 1)), training.story()
    assert len(training.events(on.AttemptStarted)) == 1
    assert_replays(training)


@pytest.mark.campaign
@pytest.mark.parametrize("version", ["installed", pytest.param("newest", marks=pytest.mark.newest)])
def test_a_spare_of_the_same_switch_takes_the_place_of_a_lost_node(lab_factory, version: str) -> None:
    lab = lab_factory(slurm=version, nodes=6, switches=(3, 3), grace_time_s=20, kill_wait_s=10)
    one, two, three, four, five, six = lab.node_names
    training = Training(lab, nodes=6, steps=60, step_seconds=0.4, run_args=("--spares=2",)).submit()
    training.wait_step(13)
    assert training.launches() == [(one, two, four, five)], "a spare of each switch"

    lab.kill_node(two)
    training.until(lambda: len(training.launches()) > 1, "the next launch")

    assert training.launches()[1:] == [(one, three, four, five)], training.story()
    assert f"{three} takes the place of {two}: below the same switch top.leaf1" in training.output()
    assert six not in training.launches()[1]
    assert_finished(training)


@pytest.mark.campaign
def test_a_spare_of_another_switch_leaves_the_others_in_their_places(lab_factory) -> None:
    """Its name comes last in Slurm's order, and its rank does not."""
    lab = lab_factory(nodes=5, switches=(2, 2, 1), grace_time_s=20, kill_wait_s=10)
    one, two, three, four, five = lab.node_names
    training = Training(lab, nodes=5, steps=60, step_seconds=0.4, run_args=("--spares=1",)).submit()
    training.wait_step(13)
    assert training.launches() == [(one, two, three, four)], "no switch for one node"

    lab.kill_node(two)
    training.until(lambda: len(training.launches()) > 1, "the next launch")

    assert training.launches()[1:] == [(one, five, three, four)], training.story()
    assert_finished(training)
    logs = training.run_dir / "logs" / "attempt-000" / "launch-001"
    ranks = {log.stem: {line.partition(":")[0] for line in log.read_text().splitlines()} for log in logs.glob("k*.log")}
    assert ranks == {one: {"0"}, five: {"1"}, three: {"2"}, four: {"3"}}
