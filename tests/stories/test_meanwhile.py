"""What an admin does to a job meanwhile, and chains of jobs that nobody looks after."""

import contextlib
import itertools

import pytest

from stepkeeper.core import events as on
from stepkeeper.core.exits import ExitCode
from tests.lab import JobFacts, Lab, LabError
from tests.lab.newest import NOT_BUILT, found
from tests.stories import acts
from tests.stories.patience import hurry, patient
from tests.stories.test_campaign import mend, release_urgent_jobs
from tests.stories.test_sites import NO_REQUEUE, ours
from tests.training import Training, assert_complete

pytestmark = pytest.mark.slurm
CHAIN_S = 480.0
EXPEDITED = "SlurmctldParameters=enable_expedited_requeue"


@pytest.mark.campaign
def test_a_job_that_an_admin_requeues_and_holds_is_saved_and_waits_for_him(lab: Lab, reference: Training) -> None:
    """`scontrol requeuehold`: Slurm has requeued it, so nobody else does; it goes on when it is released."""
    training = patient(lab, "held", after=12)
    training.wait_step(13)

    lab.run("scontrol", "requeuehold", str(training.job_id))
    held = lab.wait_job(training.job_id, waits)
    said = lab.run(training.stepkeeper, "status", training.run_dir, user=training.user).stdout
    assert f"held state): it waits until somebody does `scontrol release {training.job_id}`" in said, said
    hurry(training)
    saved = training.events(on.CheckpointCommitted)[-1].event
    lab.run("scontrol", "release", str(training.job_id))
    training.wait_end()

    assert (held.restarts, held.reason) == (1, "job_requeued_in_held_state"), held
    assert saved.emergency, training.story()
    assert training.exits() == [ExitCode.REQUEUED, ExitCode.FINISHED], training.story()
    assert lab.job(training.job_id).restarts == 1, training.story()
    assert_complete(training, reference)


@pytest.mark.campaign
def test_two_requeues_at_one_moment_are_one_and_the_job_may_be_changed_while_it_waits(
    lab: Lab, reference: Training
) -> None:
    """Ours and an admin's; then it is held, moved to other nodes and another partition, limited, and released."""
    training = patient(lab, "changed", after=12)
    job = str(training.job_id)
    training.wait_step(3)
    first = set(training.launches()[0])
    others = [node for node in lab.node_names if node not in first]
    lab.preempt(training.job_id, others)  # nowhere may it begin again before it is held
    acts.requeueing(training)
    for _ in range(3):
        with contextlib.suppress(LabError):  # one of the two requeues comes first, and the other is refused
            lab.requeue(training.job_id)
    waiting = lab.wait_job(training.job_id, waits)
    hurry(training)
    lab.run("scontrol", "hold", job)
    said = lab.run(training.stepkeeper, "status", training.run_dir, user=training.user).stdout
    assert f"job {job} is PENDING (JobHeldAdmin): it waits until an administrator does `scontrol release" in said, said
    release_urgent_jobs(lab)
    lab.run("scontrol", "update", f"JobId={job}", "Partition=urgent", f"ReqNodeList={','.join(others)}", "TimeLimit=30")
    lab.run("scontrol", "release", job)
    training.wait_end()

    assert waiting.restarts == lab.job(training.job_id).restarts == 1, training.story()
    assert set(training.launches()[-1]) == set(others), training.story()
    second = training.events(on.AttemptStarted)[1].event
    assert second.end_at is not None, "the new time limit is known"
    assert 0 < second.end_at - second.at <= 30 * 60
    assert_complete(training, reference)


@pytest.mark.campaign
def test_a_time_limit_that_is_changed_while_training_goes_on_counts_at_once(lab: Lab, reference: Training) -> None:
    """Shortened to what has nearly passed: Slurm tells nobody, and the supervisor's own clock goes by the limit asked
    for last; then the limit is there, with a signal, and the run goes on in its next attempt."""
    training = patient(lab, "shortened", sbatch_args=("--time=30",))
    training.wait_step(3)

    lab.run("scontrol", "update", f"JobId={training.job_id}", "TimeLimit=1")
    # Slurm looks at limits every half minute: also right after the next attempt has begun, were it still so short
    lab.wait_job(training.job_id, waits, CHAIN_S)
    lab.run("scontrol", "update", f"JobId={training.job_id}", "TimeLimit=30")
    hurry(training)
    training.wait_end()

    assert lab.job(training.job_id).restarts == 1, training.story()
    assert_complete(training, reference)


def waits(job: JobFacts) -> bool:
    """Whether a job that was requeued waits for its nodes: nothing of it runs any more."""
    return job.state == "PENDING" and not job.nodes and job.restarts > 0


@pytest.mark.campaign
def test_a_chain_of_jobs_that_may_not_be_requeued_needs_no_hand(lab: Lab, reference: Training) -> None:
    """Each job's minute is up before the training is done: the next one is submitted, and the losses go on."""
    training = Training(
        lab, name="chain", step_seconds=1.5, every=1000, sbatch_args=("--time=1", NO_REQUEUE, "--signal=B:USR2@1"),
        env={"STEPKEEPER_POLICY_TIME_LIMIT_MARGIN": "32"},
    ).submit()  # fmt: skip
    training.until(lambda: ExitCode.FINISHED in training.exits(), "the end of the chain", CHAIN_S)
    chain = ours(lab, training)
    training.job_id = chain[-1]
    training.wait_end()

    attempts = [record.event for record in training.events(on.AttemptStarted)]
    assert len(chain) >= 3, training.story()
    assert [attempt.job_id for attempt in attempts] == chain, training.story()
    assert training.exits() == [*[ExitCode.REQUEUED] * (len(chain) - 1), ExitCode.FINISHED], training.story()
    for before, job in itertools.pairwise(chain):
        assert f"stepkeeper:after={before}.0" in lab.job(job).raw["Comment"], training.story()
        assert lab.job(job).raw["StdOut"] == str(training.log)
    assert all(lab.job(job).restarts == 0 for job in chain)
    assert_complete(training, reference)


@pytest.mark.newest
def test_a_run_that_is_over_leaves_no_job_behind_that_is_held(lab_factory) -> None:
    """With expedited requeue Slurm would put a job whose script ends with 27 back into the queue, and hold it."""
    if found() is None:
        pytest.skip(NOT_BUILT)
    lab = lab_factory(slurm="newest", grace_time_s=20, kill_wait_s=10, slurm_conf=(EXPEDITED,))
    training = Training(lab, name="stopped", steps=4000, sbatch_args=("--requeue=expedite",)).submit()
    training.wait_step(8)

    lab.run(training.stepkeeper, "stop", training.run_dir, user=training.user, timeout_s=90.0)
    training.wait_end()
    ended = lab.job(training.job_id)
    refused = lab.submit(
        f"#!/bin/bash\nexec {training.stepkeeper} run --set policy.nope=1 -- true\n",
        sbatch_args=["-N1", "--requeue=expedite", "--output=/dev/null"],
        user=training.user,
        env={"STEPKEEPER_RUN_DIR": str(training.run_dir)},
    )
    refused_ended = lab.wait_ended(refused)

    assert (ended.state, ended.restarts, ended.exit_code) == ("FAILED", 0, f"{ExitCode.STOPPED.value}:0"), ended
    assert "Requeue=0 keeps Slurm from putting it back and holding it" in training.output()
    assert (refused_ended.state, refused_ended.restarts) == ("FAILED", 0), refused_ended
    mend(lab, training)


@pytest.mark.newest
def test_a_job_with_expedited_requeue_is_requeued_once_each_time(lab_factory, reference: Training) -> None:
    """`--requeue=expedite` (25.11 and later), where Slurm requeues a failed script itself: ours after a preemption, and
    that of a watcher after the loss of the supervisor, are each the only one."""
    if found() is None:
        pytest.skip(NOT_BUILT)
    lab = lab_factory(slurm="newest", grace_time_s=20, kill_wait_s=10, slurm_conf=(EXPEDITED,))
    training = Training(lab, name="expedited", step_seconds=0.5, sbatch_args=("--requeue=expedite",)).submit()
    training.wait_step(8)
    assert lab.job(training.job_id).raw["ExpeditedRequeue"] == "Yes"

    lab.preempt(training.job_id)
    training.wait_event(on.RequeueAnswered)
    release_urgent_jobs(lab)
    training.wait_attempt(1)
    training.wait_step(training.step() + 5)
    acts.kill_supervisor(training)
    training.wait_attempt(2)
    training.wait_end()
    mend(lab, training)

    assert lab.job(training.job_id).restarts == 2, training.story()
    assert len(training.events(on.AttemptStarted)) == 3, training.story()
    assert_complete(training, reference)
