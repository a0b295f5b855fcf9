"""A preemption finds the ranks far from the end of a step: evaluating, compiling, in a collective, behind a loader."""

import shutil
import time
from pathlib import Path

import pytest

from stepkeeper.core import events as on
from stepkeeper.core import reasons as because
from tests.lab import Lab
from tests.stories.patience import place as place_of
from tests.stories.test_campaign import give_way, release_urgent_jobs
from tests.training import SMALL, Training, assert_complete, assert_replays

pytestmark = pytest.mark.slurm
STEP = 13


@pytest.mark.campaign  # how a rank answers there is played by tests/trainer/test_notice_anywhere.py
@pytest.mark.parametrize(
    ("place", "step"),
    [("evaluation", STEP), ("loader", STEP), ("compilation", STEP), ("collective", STEP), ("warm-up", 0)],
)
def test_a_preemption_far_from_the_end_of_a_step_loses_none(
    lab: Lab, reference: Training, place: str, step: int
) -> None:
    """The last periodic save is three steps back, and no rank comes to the end of a step any more."""
    training = submitted(lab, place, step)
    until_ranks_stand(training)

    given_back_s = give_way(lab, training)

    print(f"{place}: the nodes were given back after {given_back_s:.1f} s")
    emergency = [r.event.step for r in training.events(on.CheckpointCommitted) if r.event.emergency]
    resumed = training.events(on.CheckpointChosen)[1].event
    if step:
        assert emergency[:1] == [step], training.story()
        assert resumed.step == step
    else:
        assert not emergency, training.story()
        assert because.Plain(because.Fact.NOTHING_TO_SAVE) in [
            reason for record in training.records() for reason in record.reasons
        ]
        assert resumed.step is None
    assert_complete(training, reference)
    assert_replays(training)


@pytest.mark.campaign
def test_a_preemption_before_the_first_step_after_a_resume_finds_nothing_to_save(lab: Lab, reference: Training) -> None:
    """The step that it has resumed from is on disk: it is not saved again, and the next attempt resumes from it."""
    training = submitted(lab, "resumed", STEP)
    until_ranks_stand(training)
    lab.wait_job(lab.preempt(training.job_id), "RUNNING")
    release_urgent_jobs(lab)
    training.wait_attempt(1)
    until_ranks_stand(training, attempt=1)

    give_way(lab, training)

    assert [r.event.step for r in training.events(on.CheckpointCommitted) if r.event.emergency] == [STEP]
    assert [r.event.step for r in training.events(on.CheckpointChosen)] == [None, STEP, STEP], training.story()
    reasons = [reason for record in training.records() if record.attempt == 1 for reason in record.reasons]
    assert because.Plain(because.Fact.NOTHING_TO_SAVE) in reasons, training.story()
    assert training.events(on.AttemptStarted)[2].event.failures == 0
    assert_complete(training, reference)
    assert_replays(training)


def submitted(lab: Lab, where: str, step: int) -> Training:
    """A training that will stand somewhere before the end of a step."""
    training = Training(lab, name=f"far-{where}", steps=40)
    place_of(training).mkdir()
    script = place_of(training) / "far.py"
    shutil.copyfile(Path(__file__).with_name("far.py"), script)
    for path in (place_of(training), script):
        shutil.chown(path, training.user)
    words = ("--steps=40", "--seed=7", "--checkpoint-every-steps=10", *SMALL)
    training.command = (str(training.python), str(script), where, str(step), *words)
    return training.submit()


def until_ranks_stand(training: Training, attempt: int = 0) -> None:
    told = place_of(training)
    training.until(lambda: len(list(told.glob(f"stands-{attempt}-*"))) == training.nodes, "all ranks stand")
    time.sleep(1)
