"""Slurm's controller hangs, dies, and is followed by another: training never hears of it, and the requeue succeeds."""

import signal
import time

import pytest

from stepkeeper.core import events as on
from tests.lab import Lab
from tests.stories import acts
from tests.stories.patience import hurry, patient
from tests.stories.test_campaign import mend, release_urgent_jobs
from tests.training import Training, assert_complete

pytestmark = [pytest.mark.slurm, pytest.mark.campaign]
TAKEN_OVER_S = 240.0
ONE_LOOK_S = 120.0  # a command that meets a backup still in waiting sleeps for half a minute
HANGS_S = 8.0  # longer than a call may take


def answers(lab: Lab) -> bool:
    """Whether some controller takes orders."""
    return lab.run("squeue", "--noheader", check=False, timeout_s=ONE_LOOK_S).returncode == 0


def saved(lab: Lab) -> None:
    """Wait until the controller has written down which jobs run: here it does so only when something happens."""
    began = time.time()
    held = lab.submit("true", sbatch_args=["--hold", "--nodes=1", "--output=/dev/null"])
    lab.until(lambda: (lab.directory / "state" / "job_state").stat().st_mtime > began, "its state in the file", 120)
    lab.run("scancel", str(held))


def goes_on(training: Training) -> None:
    """Wait for the second attempt; a backup controller that has nothing else to do needs a job to look at the queue."""

    def begun() -> bool:
        if len(training.events(on.AttemptStarted)) > 1:
            return True
        training.lab.submit("true", sbatch_args=["--partition=urgent", "--nodes=1", "--output=/dev/null"])
        time.sleep(3)
        return False

    training.until(begun, "the second attempt")


def ends_with_the_backup(training: Training) -> None:
    """Wait for the requeue, the next attempt and the end."""
    training.wait_event(on.RequeueAnswered)
    release_urgent_jobs(training.lab)
    goes_on(training)
    training.wait_end()


def test_a_primary_controller_that_dies_in_training_is_followed_by_the_backup(lab_factory, reference: Training) -> None:
    """Killed, not stopped: the backup finds out by itself, and then preempts and requeues our job."""
    lab = lab_factory(grace_time_s=20, kill_wait_s=10, backup_controller=True)
    # it must not be over before somebody has taken over, half a minute later where a command has met him in waiting
    training = patient(lab, "fail-over", env={"PATIENT_STEP_S": "3"})
    training.wait_step(3)
    saved(lab)

    lab.stop_slurmctld(signal.SIGKILL)
    try:
        training.until(lambda: answers(lab), "the backup controller", TAKEN_OVER_S)
        training.wait_step(training.step() + 2)
        assert len(training.launches()) == 1, training.story()
        lab.preempt(training.job_id)
        training.wait_event(on.RequeueAnswered)
        hurry(training)
        ends_with_the_backup(training)
        found = lab.job(training.job_id)
    finally:
        lab.start_slurmctld()

    assert found.restarts == 1, training.story()
    assert_complete(training, reference)


def test_a_primary_that_hangs_in_the_requeue_and_is_ended_is_followed_by_the_backup(
    lab_factory, reference: Training
) -> None:
    """While it takes connections and answers none, Slurm's commands turn to no other; then somebody ends it."""
    lab = lab_factory(grace_time_s=20, kill_wait_s=10, backup_controller=True)
    training = patient(lab, "fail-over-late", after=12)
    training.wait_step(3)
    saved(lab)
    acts.requeueing(training)
    hurry(training)
    try:
        with lab.hung_slurmctld():
            time.sleep(HANGS_S)
            too_late = bool(training.events(on.RequeueAnswered))
            if not too_late:
                lab.stop_slurmctld(signal.SIGKILL)
        if too_late:  # it had answered just before it stood still: what it has not yet written down would die with it
            saved(lab)
            lab.stop_slurmctld(signal.SIGKILL)
        training.until(lambda: answers(lab), "the backup controller", TAKEN_OVER_S)
        ends_with_the_backup(training)
        found = lab.job(training.job_id)
    finally:
        lab.start_slurmctld()

    answered = [record.event for record in training.events(on.RequeueAnswered)]
    assert [answer.ok for answer in answered][-1], training.story()
    assert found.restarts == 1, training.story()
    assert len(training.events(on.AttemptStarted)) == 2, training.story()
    assert_complete(training, reference)


def test_a_controller_that_stands_still_in_the_requeue_requeues_once(lab: Lab, reference: Training) -> None:
    """Orders that it could not answer reach it when it goes on: there is one requeue, and never a second."""
    training = patient(lab, "slow-controller", after=12)
    acts.requeueing(training)
    hurry(training)
    with lab.hung_slurmctld():
        time.sleep(25)
    release_urgent_jobs(lab)
    training.wait_end()
    mend(lab, training)

    assert lab.job(training.job_id).restarts == 1, training.story()
    assert len(training.events(on.AttemptStarted)) == 2, training.story()
    assert_complete(training, reference)


def test_training_does_not_notice_a_controller_that_is_slow_for_a_minute(lab: Lab, reference: Training) -> None:
    """No step waits for Slurm, and no watcher or launch is given up."""
    training = Training(lab, name="slow-minute", step_seconds=0.8).submit()
    training.wait_step(5)
    with lab.hung_slurmctld():
        training.wait_step(36)
    training.wait_end()

    assert len(training.launches()) == 1, training.story()
    assert training.events(on.WatcherLost) == [], training.story()
    assert_complete(training, reference)
