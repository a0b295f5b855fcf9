"""A rank that is sure to do nothing ends the launch after two looks; one that may go on has the patience of before."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from stepkeeper.core import effects as do
from stepkeeper.core import events as on
from stepkeeper.core.causes import Cause
from tests.lab import Lab
from tests.stories.test_failures import failing
from tests.training import SMALL, Training, assert_complete

pytestmark = [pytest.mark.slurm, pytest.mark.campaign]
STEP = 38
PATIENT = ("--hang-least-s=1000",)  # only a first look ends a launch within the time of a story
SCRIPT = Path(__file__).with_name("pausing.py")


def looks(training: Training) -> list[do.CollectStacks]:
    return [each for record in training.records() for each in record.effects if isinstance(each, do.CollectStacks)]


@pytest.mark.parametrize(
    ("how", "doing"), [("asleep", "is in sleeping_for_hours (failing.py:"), ("stopped", "was stopped by a signal")]
)
def test_a_rank_that_cannot_go_on_is_not_waited_for(lab: Lab, reference: Training, how: str, doing: str) -> None:
    training = failing(lab, how, step=STEP, step_seconds=0.5, run_args=PATIENT)
    training.wait_end()

    *_, look = looks(training)
    assert look.brief, training.story()
    *_, seen = [record.event for record in training.events(on.StacksCollected)]  # a busy machine is slow for a moment
    assert f"rank 1 {doing}" in seen.summary, seen.summary
    assert seen.sure_s > 1000
    (said,) = [record.event for record in training.events(on.Judged)]
    assert (said.cause, said.rank, said.rule) == (Cause.HANG, 1, "progress-silence"), training.story()
    began = [record.event.warm for record in training.events(on.LaunchBegan)]
    assert began == [0, 2], "what imports torch for the relaunch begins at the first of the two looks"
    assert_complete(training, reference)


def test_under_torchrun_a_rank_that_cannot_go_on_is_not_waited_for_either(lab: Lab) -> None:
    """Two ranks a node: Slurm's number of a torchrun is that of a rank, which may be on another node."""
    torchrun = Training(lab).python.with_name("torchrun")
    training = failing(
        lab, "asleep", step=STEP, step_seconds=0.5, rank=2, run_args=PATIENT, name="asleep-under-torchrun",
        launcher=(str(torchrun), "--nnodes=2", "--nproc-per-node=2", "--rdzv-backend=c10d"),
    )  # fmt: skip
    training.wait_end()

    *_, look = looks(training)
    assert look.brief, training.story()
    *_, seen = [record.event for record in training.events(on.StacksCollected)]
    assert "rank 2 is in sleeping_for_hours (failing.py:" in seen.summary, seen.summary
    assert seen.sure_s > 1000
    (said,) = [record.event for record in training.events(on.Judged)]
    assert (said.cause, said.rank) == (Cause.HANG, 2), training.story()
    assert lab.job(training.job_id).state == "COMPLETED", training.story()


@pytest.mark.parametrize(("seconds", "step", "steps"), [(0.2, 200, 210), (2.0, 45, 48)])
def test_a_rank_that_only_sleeps_while_all_others_wait_is_not_waited_for(
    lab: Lab, seconds: float, step: int, steps: int
) -> None:
    training = failing(
        lab, "hang", step=step, name=f"sleeps-{step}", steps=steps, step_seconds=seconds, run_args=PATIENT
    )
    training.wait_end()

    *_, seen = [record.event for record in training.events(on.StacksCollected)]
    assert (seen.awaited, seen.rank) == (True, 1), training.story()
    assert "rank 1 is in waiting_for_data (failing.py:" in seen.summary
    (said,) = [record.event for record in training.events(on.Judged)]
    assert (said.cause, said.rank) == (Cause.HANG, 1), training.story()


@pytest.mark.parametrize(
    "pause",
    [
        "sleep", "nap", "stop", "lock", "poll", "seldom", "fetch", "answer", "child", "load", "evaluate", "collect",
        "write", "compile",
    ],
)  # fmt: skip
def test_a_rank_that_pauses_is_never_ended(lab: Lab, pause: str) -> None:
    """The first such pause of an even run, which is looked at."""
    training = Training(lab, name=f"pause-{pause}", steps=95)  # long enough to know what is usual
    script = training.work / SCRIPT.name
    shutil.copyfile(SCRIPT, script)
    script.chmod(0o644)
    training.command = (
        str(training.python), str(script), pause, "90", f"--steps={training.steps}", "--seed=7",
        f"--checkpoint-every-steps={training.every}", "--step-seconds-min=0.5", *SMALL,
    )  # fmt: skip
    training.submit()
    training.wait_end()

    assert pause == "stop" or looks(training), "nobody has looked at it, so it tells nothing"
    assert len(training.launches()) == 1, training.story()
    assert not training.events(on.Judged)
    assert lab.job(training.job_id).state == "COMPLETED"
