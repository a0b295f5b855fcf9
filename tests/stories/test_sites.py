"""Sites as they are: nothing may be requeued, arrays, other ways to preempt, admins with plans of their own."""


import pytest

from stepkeeper.core import events as on
from tests.lab import Lab
from tests.stories.test_campaign import release_urgent_jobs
from tests.training import Training, assert_complete

pytestmark = pytest.mark.slurm
NO_REQUEUE = "--no-requeue"


def test_a_job_that_slurm_may_not_requeue_is_submitted_again_and_goes_on(lab: Lab, reference: Training) -> None:
    """The same log, run directory, shape and arguments; the losses of one uninterrupted run."""
    training = Training(lab, name="resubmitted", sbatch_args=(NO_REQUEUE, "--time=30", "--comment=for ada")).submit()
    training.wait_step(13)
    first = training.job_id

    lab.preempt(first)
    training.wait_event(on.RequeueAnswered)
    training.job_id = successor(training)
    release_urgent_jobs(lab)
    training.wait_end()

    before, after = lab.job(first).raw, lab.job(training.job_id).raw
    alike = ("JobName", "Partition", "TimeLimit", "NumNodes", "NumCPUs", "MinMemoryNode", "TresPerNode", "StdOut")
    assert {key: after[key] for key in alike} == {key: before[key] for key in alike}, training.story()
    assert after["Comment"].startswith("for ada stepkeeper:after="), after["Comment"]
    started = [record.event.job_id for record in training.events(on.AttemptStarted)]
    assert started == [first, training.job_id], training.story()
    assert lab.job(first).restarts == 0
    assert len(ours(lab, training)) == 2, training.story()
    assert_complete(training, reference)


def successor(training: Training) -> int:
    """The job that was submitted in place of the training's."""
    answers = [record.event for record in training.events(on.RequeueAnswered)]
    assert answers[-1].ok, training.story()
    assert answers[-1].job_id is not None, training.story()
    return answers[-1].job_id


def ours(lab: Lab, training: Training) -> list[int]:
    """Every job of the training's name that Slurm knows."""
    listed = lab.run("squeue", "--noheader", "--states=all", f"--name={training.name}", "--format=%A").stdout
    return sorted(int(number) for number in listed.split())
