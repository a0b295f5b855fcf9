"""A preemption finds the ranks far from the end of a step: in an evaluation, a compilation, behind a loader."""

import shutil
import time
from pathlib import Path

import pytest

from stepkeeper.core import events as on
from stepkeeper.core import reasons as because
from tests.lab import Lab
from tests.stories.patience import place as place_of
from tests.stories.test_campaign import give_way
from tests.training import SMALL, Training, assert_complete, assert_replays

pytestmark = pytest.mark.slurm
STEP = 13


@pytest.mark.campaign  # how a rank answers there is played by tests/trainer/test_notice_anywhere.py
@pytest.mark.parametrize(
    ("place", "step"), [("evaluation", STEP), ("loader", STEP), ("compilation", STEP), ("warm-up", 0)]
)
def test_a_preemption_far_from_the_end_of_a_step_loses_none(
    lab: Lab, reference: Training, place: str, step: int
) -> None:
    """The last periodic save is three steps back, and no rank comes to the end of a step any more."""
    training = Training(lab, name=f"far-{place}", steps=40)
    place_of(training).mkdir()
    script = place_of(training) / "far.py"
    shutil.copyfile(Path(__file__).with_name("far.py"), script)
    for path in (place_of(training), script):
        shutil.chown(path, training.user)
    words = ("--steps=40", "--seed=7", "--checkpoint-every-steps=10", *SMALL)
    training.command = (str(training.python), str(script), place, str(step), *words)
    training.submit()
    training.until(lambda: len(list(place_of(training).glob("stands-*"))) == training.nodes, "all ranks stand")
    time.sleep(1)

    given_back_s = give_way(lab, training)

    print(f"{place}: the nodes were given back after {given_back_s:.1f} s")
    emergency = [r.event.step for r in training.events(on.CheckpointCommitted) if r.event.emergency]
    resumed = training.events(on.CheckpointChosen)[1].event
    if step:
        assert emergency[:1] == [step], training.story()
        assert resumed.step == step
    else:
        assert not emergency, training.story()
        assert because.NothingToSave() in [reason for record in training.records() for reason in record.reasons]
        assert resumed.step is None
    assert_complete(training, reference)
    assert_replays(training)
