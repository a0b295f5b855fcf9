"""Every way in which Slurm says that it wants the nodes back, and the one that must end the run: scancel."""

import time

import pytest

from stepkeeper.core import effects as do
from stepkeeper.core import events as on
from stepkeeper.core.exits import ExitCode
from tests.lab import Lab
from tests.stories.patience import hurry, patient
from tests.stories.test_campaign import give_way, mend, release_urgent_jobs
from tests.training import SMALL, STORY_S, Training, assert_complete, assert_replays, strict_script

pytestmark = pytest.mark.slurm
GRACE_S = 20
TRIES = 4
LIMITED_S = 400.0  # a job of a minute begins, is told, and begins again, on a busy machine


@pytest.mark.campaign
def test_the_nodes_are_given_back_as_soon_as_the_checkpoint_is_verified(lab: Lab, reference: Training) -> None:
    """Grace time is a limit, not a wait: the urgent job starts when the commit is done, not when grace is over.

    The script's parser ends on any argument that it does not know: a resume appends none.
    """
    training = Training(lab, name="give-back", steps=40, step_seconds=0.25)
    words = ("--steps=40", "--seed=7", "--checkpoint-every-steps=10", "--step-seconds-min=0.25", *SMALL)
    training.command = (str(training.python), str(strict_script(training, words)))
    training.submit()
    training.wait_step(13)

    given_back_s = give_way(lab, training)

    assert given_back_s < GRACE_S, "the nodes came back only with the end of the grace time"
    notice, commit, verified = _emergency(training)
    assert notice.effects[0].deadline_at > verified.event.at >= commit.event.at
    assert verified.event.ok
    assert_complete(training, reference)
    assert_replays(training)


@pytest.mark.campaign
def test_the_batch_process_alone_is_told_by_a_user_signal(lab_factory, reference: Training) -> None:
    """`preempt_send_user_signal`: the ranks hear nothing, only the supervisor gets SIGUSR1."""
    lab = lab_factory(grace_time_s=GRACE_S, kill_wait_s=10, send_user_signal=True)
    training = Training(lab, name="user-signal", steps=40, step_seconds=0.25).submit()
    training.wait_step(13)

    lab.preempt(training.job_id)
    training.wait_event(on.RequeueAnswered)
    release_urgent_jobs(lab)
    training.wait_end()

    assert [r.event.signal for r in training.events(on.SignalReceived)][:1] == ["USR1"], training.story()
    assert_complete(training, reference)


@pytest.mark.campaign
def test_a_time_limit_is_met_with_a_checkpoint_and_another_attempt(lab: Lab, reference: Training) -> None:
    """One minute is Slurm's shortest limit, and it may signal up to a minute early: that is what this uses."""
    # slurmctld looks at time limits every half minute, and we look ourselves: the training must last far longer
    # than the whole minute, however fast the machine starts it
    training = Training(
        lab, name="time-limit", steps=40, step_seconds=2.0, sbatch_args=("--time=1", "--signal=B:USR1@55")
    ).submit()

    training.wait_attempt(1, LIMITED_S)
    lab.run("scontrol", "update", f"JobId={training.job_id}", "TimeLimit=30")  # one is enough
    training.wait_end(LIMITED_S)

    assert len(training.events(on.AttemptStarted)) > 1, training.story()
    assert "time limit" in training.output()
    assert_complete(training, reference)


@pytest.mark.campaign  # Slurm's shortest limit is a minute
def test_a_time_limit_without_an_early_signal_leaves_kill_wait(lab: Lab, reference: Training) -> None:
    """Without `--signal` the first word is SIGTERM to everybody, with Reason=TimeLimit."""
    training = Training(
        lab, name="late-limit", steps=40, step_seconds=4.0, sbatch_args=("--time=1", "--signal=B:CONT@1")
    ).submit()

    training.wait_event(on.CheckpointChosen, count=2)
    lab.run("scancel", str(training.job_id))
    training.wait_end()

    _, commit, _ = _emergency(training)
    resumed = training.events(on.CheckpointChosen)[1].event
    assert resumed.step == commit.event.step
    expected = reference.losses()
    assert all(loss == expected[step] for step, loss in training.losses().items())


def was_requeued_first(training: Training) -> bool:
    """Whether the requeue, which Slurm accepted, was asked for before any signal came: the cancel was too late.

    The requeue ends the job by a signal, which may be heard before the answer.
    """
    records = training.records()
    asked = next((n for n, each in enumerate(records) if any(isinstance(e, do.Requeue) for e in each.effects)), None)
    signalled = next((n for n, each in enumerate(records) if isinstance(each.event, on.SignalReceived)), len(records))
    accepted = any(isinstance(each.event, on.RequeueAnswered) and each.event.ok for each in records)
    return accepted and asked is not None and asked < signalled


@pytest.mark.parametrize(
    "moment",
    [
        pytest.param("starting", marks=pytest.mark.campaign),
        pytest.param("training", marks=pytest.mark.campaign),
        "saving",
    ],
)
def test_scancel_never_leads_to_a_requeue(lab: Lab, moment: str) -> None:
    """In the story of a save no rank comes to the end of its step, and with it to the save, before the cancel."""
    for number in range(TRIES):
        training = patient(lab, f"cancel-{moment}-{number}", after=13, steps=4000, env={"PATIENT_STEP_S": str(STORY_S)})
        if moment == "starting":
            training.wait_event(on.AttemptStarted)
        else:
            training.wait_step(13)
        if moment == "saving":
            lab.preempt(training.job_id)
            training.until(lambda training=training: "request_save" in training.output(), "the request to save")
        lab.cancel(training.job_id, user=training.user)
        too_late = lab.job(training.job_id).restarts > 0  # the grace time was over: Slurm has requeued the job itself
        hurry(training)
        training.wait_end()
        mend(lab, training)
        if too_late:
            continue
        if not was_requeued_first(training):
            break
        assert len(training.events(on.AttemptStarted)) == 1, training.story()

    assert lab.job(training.job_id).state in ("CANCELLED", "PREEMPTED", "COMPLETED", "FAILED"), training.story()
    assert lab.job(training.job_id).restarts == 0, training.story()
    assert training.exits() in ([ExitCode.CANCELLED], []), training.story()


@pytest.mark.campaign
def test_a_signal_that_ends_nothing_saves_and_training_goes_on(lab: Lab, reference: Training) -> None:
    """`scancel --batch --signal=USR1` by a user: a checkpoint now, please."""
    training = Training(lab, name="save-now", steps=40, every=1000, step_seconds=0.25).submit()
    training.wait_step(13)

    lab.run("scancel", "--batch", "--signal=USR1", str(training.job_id))
    training.wait_event(on.CheckpointCommitted)
    training.wait_end()

    assert len(training.events(on.AttemptStarted)) == 1, training.story()
    assert 13 <= training.committed()[0] < 40
    assert_complete(training, reference)


@pytest.mark.campaign
def test_a_controller_that_is_away_during_the_requeue_is_waited_for(lab: Lab, reference: Training) -> None:
    training = patient(lab, "no-controller", after=5)
    training.wait_step(5)
    batch = lab.batch_pid(training.job_id)

    lab.stop_slurmctld()
    lab.run("kill", "-USR1", str(batch))
    training.wait_event(on.SlurmAnswered, timeout_s=150)
    hurry(training)
    time.sleep(5)
    lab.start_slurmctld()
    training.wait_end()

    assert training.events(on.SlurmAnswered)[0].event.job is None
    assert len(training.events(on.AttemptStarted)) == 2, training.story()
    assert_complete(training, reference)


@pytest.mark.campaign
def test_a_second_notice_while_the_first_ones_checkpoint_is_written_changes_nothing(
    lab: Lab, reference: Training
) -> None:
    """Slurm preempts, and an administrator sends SIGTERM to everybody beside it, twice: one save, one requeue.

    The checkpoint is written in a moment: where that was over before the administrator was heard, it is played again.
    """
    for number in range(TRIES):
        training = patient(lab, f"two-notices-{number}", after=12)
        training.wait_step(13)
        lab.preempt(training.job_id)
        training.until(lambda training=training: "request_save" in training.output(), "the request to save")
        for _ in range(2):
            lab.run("scancel", "--full", "--signal=TERM", str(training.job_id), check=False)  # it may be gone
        training.wait_event(on.RequeueAnswered)
        hurry(training)
        release_urgent_jobs(lab)
        training.wait_end()
        mend(lab, training)
        if (heard := len(training.events(on.SignalReceived)) + len(training.events(on.NodeSignaled))) > 1:
            break

    stops = [effect for r in training.records() for effect in r.effects if isinstance(effect, do.RequestSave)]
    assert len({effect.deadline_at for effect in stops if effect.stop}) <= 2, training.story()
    assert heard > 1, training.story()
    assert len(training.events(on.AttemptStarted)) == 2, training.story()
    assert lab.job(training.job_id).restarts == 1
    assert_complete(training, reference)


def _emergency(training: Training):
    """The notice that led to a save, its commit, and its verification."""
    records = training.records()
    notice = next(r for r in records if any(isinstance(effect, do.RequestSave) and effect.stop for effect in r.effects))
    commit = next(r for r in records if isinstance(r.event, on.CheckpointCommitted) and r.event.emergency)
    verified = next(r for r in records if isinstance(r.event, on.CheckpointVerified))
    return notice, commit, verified
