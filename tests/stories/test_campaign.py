"""Whatever befalls a run, whenever: it ends complete, with the losses of an uninterrupted run, bit for bit.

In each story one thing happens at one moment.  `make test` plays the commonest three; `make campaign` the others.
"""

import contextlib

import pytest

from stepkeeper.core import events as on
from tests.lab import Lab, LabTimeoutError
from tests.stories.acts import ACTS, MOMENTS
from tests.training import Training, assert_complete

STEPS = 40
COMMONEST = ("preempt", "kill-supervisor", "kill-rank")


def story(act: str, moment: str):
    marks = [] if moment == "training" and act in COMMONEST else [pytest.mark.campaign]
    return pytest.param(act, moment, id=f"{act}-while-{moment}", marks=marks)


@pytest.mark.slurm
@pytest.mark.parametrize(("act", "moment"), [story(act, moment) for act in ACTS for moment in MOMENTS])
def test_a_run_survives(lab: Lab, reference: Training, act: str, moment: str) -> None:
    # slow enough that a run whose supervisor was killed is rescued before it is finished
    training = Training(lab, name=f"{act}-{moment}", steps=STEPS, step_seconds=0.25).submit()
    try:
        MOMENTS[moment](training)
        ACTS[act](training)
        release_urgent_jobs(lab)
        training.wait_end()
    finally:
        mend(lab, training)

    assert_complete(training, reference)
    assert_nothing_verified_was_lost(training)
    assert lab.job(training.job_id).state == "COMPLETED", training.story()


def assert_nothing_verified_was_lost(training: Training) -> None:
    """Each launch resumes from the newest step directory that was ever reported as committed."""
    committed = 0
    for record in training.records():
        if isinstance(record.event, on.CheckpointCommitted):
            committed = max(committed, record.event.step)
        if isinstance(record.event, on.CheckpointChosen):
            assert (record.event.step or 0) >= committed, training.story()


def release_urgent_jobs(lab: Lab) -> None:
    """Let urgent jobs run for a moment, then give the nodes back."""
    queue = lab.run("squeue", "--noheader", "--name=urgent", "--format=%i").stdout.split()
    for job_id in queue:
        with contextlib.suppress(LabTimeoutError):  # one of its nodes was lost: it would wait for ever
            lab.wait_job(int(job_id), lambda job: job.state != "PENDING", timeout_s=25)
        lab.release(int(job_id))


def mend(lab: Lab, training: Training) -> None:
    """Leave the lab whole for the next story."""
    lab.run("scancel", str(training.job_id), check=False)
    for job_id in lab.run("squeue", "--noheader", "--name=urgent", "--format=%i").stdout.split():
        lab.run("scancel", job_id, check=False)
    lost = [name for name, node in lab.nodes().items() if not node.is_up]
    for name in lost:
        lab.start_node(name, timeout_s=60)
    if lost:
        # Slurm 22.05 goes on counting GPUs of a job that lost a node ("bad node_offset"): a job that wants one of its
        # nodes whole would never start
        with contextlib.suppress(LabTimeoutError):  # what is left of a job there ends with the restart, or later
            lab.until(lambda: not lab.run("squeue", "--noheader").stdout.strip(), "an empty queue", 60)
        lab.restart_slurmctld()
