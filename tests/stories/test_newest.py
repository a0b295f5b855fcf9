"""The main story on the newest Slurm: preempted, saved, requeued, and the losses are the same to the last bit."""

import pytest

from stepkeeper.core import effects as do
from stepkeeper.core import events as on
from tests.lab import Lab
from tests.lab.newest import NOT_BUILT, found
from tests.stories.patience import hurry, patient
from tests.stories.test_campaign import mend, release_urgent_jobs
from tests.training import Training, assert_complete

pytestmark = [pytest.mark.slurm, pytest.mark.newest]
GRACE_S = 20


@pytest.fixture(scope="module")
def lab(lab_factory):
    if found() is None:
        pytest.skip(NOT_BUILT)
    return lab_factory(slurm="newest", grace_time_s=GRACE_S, kill_wait_s=10)


@pytest.fixture(scope="module")
def reference(lab: Lab):
    training = Training(lab, name="reference", step_seconds=0.0).submit()
    training.wait_end()
    assert lab.job(training.job_id).state == "COMPLETED", training.story()
    return training


def test_a_preempted_run_gives_its_nodes_back_and_goes_on_where_it_was(lab: Lab, reference: Training) -> None:
    training = patient(lab, "preempted", after=12)
    training.wait_step(13)

    urgent = lab.preempt(training.job_id)
    lab.wait_job(urgent, "RUNNING")
    hurry(training)
    release_urgent_jobs(lab)
    training.wait_end()

    notice = next(r for r in training.records() if any(isinstance(e, do.RequestSave) for e in r.effects))
    saved = next(r for r in training.events(on.CheckpointCommitted) if r.event.emergency)
    assert notice.effects[0].deadline_at > saved.event.at, training.story()
    assert lab.job(training.job_id).state == "COMPLETED", training.story()
    assert len(training.events(on.AttemptStarted)) == 2, training.story()
    assert_complete(training, reference)


def test_scancel_never_leads_to_a_requeue(lab: Lab) -> None:
    training = Training(lab, name="cancelled", steps=4000).submit()
    training.wait_step(13)

    lab.cancel(training.job_id, user=training.user)
    training.wait_end()

    found = lab.job(training.job_id)
    assert (found.state, found.restarts) == ("CANCELLED", 0), training.story()
    mend(lab, training)


def test_an_administrators_requeue_is_not_requeued_again(lab: Lab, reference: Training) -> None:
    training = patient(lab, "requeued", after=12)
    training.wait_step(13)

    lab.requeue(training.job_id)
    training.wait_attempt(1)
    hurry(training)
    training.wait_end()

    assert lab.job(training.job_id).restarts == 1, training.story()
    assert_complete(training, reference)


def test_the_batch_process_alone_is_told_by_a_user_signal(lab_factory, reference: Training) -> None:
    """The parameter has another name there than on 22.05."""
    told_by_signal = lab_factory(slurm="newest", nodes=2, grace_time_s=GRACE_S, kill_wait_s=10, send_user_signal=True)
    training = patient(told_by_signal, "user-signal", after=12)
    training.wait_step(13)

    told_by_signal.preempt(training.job_id)
    training.wait_event(on.RequeueAnswered)
    hurry(training)
    release_urgent_jobs(told_by_signal)
    training.wait_end()

    assert [r.event.signal for r in training.events(on.SignalReceived)][:1] == ["USR1"], training.story()
    assert_complete(training, reference)


def test_a_whole_run_by_pyslurm(lab: Lab, reference: Training) -> None:
    """Asked for and found to fit, in an interpreter of its own; both attempts say so, and it makes the requeue."""
    newest = found()
    assert newest is not None, "the lab runs it"
    env = {"STEPKEEPER_SLURM_CLIENT": f"pyslurm:{newest.python}"}
    training = patient(lab, "pyslurm", after=12, env=env)
    training.wait_step(13)

    lab.preempt(training.job_id)
    training.wait_event(on.RequeueAnswered)
    hurry(training)
    release_urgent_jobs(lab)
    training.wait_end()

    assert training.output().count("pyslurm, as set: it reports what") == 2, training.output()
    assert lab.job(training.job_id).restarts == 1, training.story()
    assert_complete(training, reference)
