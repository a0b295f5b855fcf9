"""Every way in which a site may preempt: with and without grace time, by a requeue of Slurm's or by a cancellation.

Suspension is another matter: `test_suspended.py`.  The site keeps the logs of its jobs (JobFileAppend=1), and the batch
script says nothing of them.
"""

import pytest

from stepkeeper.core import effects as do
from stepkeeper.core import events as on
from tests.lab import Lab
from tests.lab.facts import JobFacts
from tests.stories import acts
from tests.stories.patience import hurry, patient
from tests.stories.test_campaign import mend, release_urgent_jobs
from tests.stories.test_interactive import said
from tests.stories.test_sites import NO_REQUEUE, ours, successor
from tests.training import Training, assert_complete, plain_script

pytestmark = [pytest.mark.slurm, pytest.mark.campaign]
SUDDEN, CANCELS, CANCELS_LATER = "sudden", "cancels", "later"
SITE = (
    f"PartitionName={SUDDEN} Nodes=ALL PriorityTier=1 PreemptMode=REQUEUE GraceTime=0 MaxTime=INFINITE State=UP",
    f"PartitionName={CANCELS} Nodes=ALL PriorityTier=1 PreemptMode=CANCEL GraceTime=0 MaxTime=INFINITE State=UP",
    f"PartitionName={CANCELS_LATER} Nodes=ALL PriorityTier=1 PreemptMode=CANCEL GraceTime=20 MaxTime=INFINITE State=UP",
    "JobFileAppend=1",
)


@pytest.fixture(scope="module")
def site(lab_factory) -> Lab:
    return lab_factory(grace_time_s=20, kill_wait_s=15, slurm_conf=SITE)


def test_without_a_notice_a_preemption_costs_what_was_not_saved_at_most(site: Lab, reference: Training) -> None:
    """GraceTime=0: Slurm has requeued the job when it tells so.  KillWait is enough for a save, first; then a rank
    stands still, and none can be made: the newest periodic one is what remains."""
    training = Training(
        site, name="sudden", step_seconds=0.3, every=5, sbatch_args=(f"--partition={SUDDEN}",),
        script=plain_script(site),
    ).submit()  # fmt: skip
    try:
        training.wait_step(8)
        site.preempt(training.job_id)
        site.wait_job(training.job_id, lambda job: is_waiting(job, 1))
        release_urgent_jobs(site)
        training.until(lambda: any(map(is_periodic, saves(training, 1))), "a periodic save of the second attempt")

        acts.stop_rank(training)
        site.preempt(training.job_id)
        site.wait_job(training.job_id, lambda job: is_waiting(job, 2))
        stood_at = training.step()
        release_urgent_jobs(site)
        training.wait_end()
    finally:
        mend(site, training)

    assert site.job(training.job_id).restarts == 2, training.story()
    orders = [effect for record in training.records() for effect in record.effects if isinstance(effect, do.Requeue)]
    assert orders == [], "Slurm has requeued it, and nobody does a second time"
    chosen = [record.event.step for record in training.events(on.CheckpointChosen)]
    assert len(chosen) == 3, training.story()
    assert left_saved(training, 0) == chosen[1], training.story()
    assert left_saved(training, 1) is None, training.story()
    newest = max(save.step for save in saves(training, 1))
    # the word of one that became whole as the rank was stopped may be lost with it
    assert chosen[2] in (newest, newest + training.every), training.story()
    assert stood_at - chosen[2] < 2 * training.every, "an interval, and a save that was under way"
    assert_every_attempt_is_in_the_log(training, 3)
    assert_complete(training, reference)


@pytest.mark.parametrize("partition", [CANCELS, CANCELS_LATER])
@pytest.mark.parametrize("requeue", ["--requeue", NO_REQUEUE])
def test_a_site_that_cancels_what_it_preempts_loses_nothing(
    site: Lab, reference: Training, partition: str, requeue: str
) -> None:
    """Slurm would requeue nothing: with grace time there is a notice, without it only SIGTERM and KillWait."""
    training = patient(
        site, f"{partition}{requeue}", after=12, sbatch_args=(f"--partition={partition}", requeue),
        script=plain_script(site),
    )  # fmt: skip
    training.wait_step(13)
    first = training.job_id

    site.preempt(first)
    training.wait_event(on.RequeueAnswered)
    if requeue == NO_REQUEUE:
        training.job_id = successor(training)
    hurry(training)
    release_urgent_jobs(site)
    training.wait_end()

    assert len(training.events(on.AttemptStarted)) == 2, training.story()
    assert [len(training.events(on.RequeueAnswered)), len(ours(site, training))] == [1, 1 + (requeue == NO_REQUEUE)]
    assert site.job(first).restarts == (requeue != NO_REQUEUE), training.story()
    assert left_saved(training, 0) == training.events(on.CheckpointChosen)[1].event.step, training.story()
    assert_every_attempt_is_in_the_log(training, 2)
    assert_complete(training, reference)


def is_waiting(job: JobFacts, restarts: int) -> bool:
    return job.state == "PENDING" and not job.nodes and job.restarts == restarts


def saves(training: Training, attempt: int) -> list[on.CheckpointCommitted]:
    return [record.event for record in training.events(on.CheckpointCommitted) if record.attempt == attempt]


def left_saved(training: Training, attempt: int) -> int | None:
    """The step with which the ranks of an attempt left; None where they were ended without."""
    ends = [record.event for record in training.events(on.LaunchEnded) if record.attempt == attempt]
    return max(save.step for save in saves(training, attempt)) if any(end.stopped for end in ends) else None


def is_periodic(save: on.CheckpointCommitted) -> bool:
    return not save.emergency


def assert_every_attempt_is_in_the_log(training: Training, attempts: int) -> None:
    """In the job's own log, which the site appends to, and apart for each attempt in the run directory."""
    assert "log_emptied" not in training.output(), training.output()
    for attempt in range(attempts):
        kept = (training.run_dir / "logs" / f"attempt-{attempt:03d}" / "supervisor.jsonl").read_text()
        for line in ("attempt_started", f'"attempt": {attempt}'):
            assert line in kept, kept
    started = [attempt for attempt, _ in said(training, "attempt_started")]
    assert started == list(range(attempts)), training.output()
