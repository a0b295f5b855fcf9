"""Sites as they are: nothing may be requeued, arrays, and what a watcher does where a supervisor was lost."""

import pytest

from stepkeeper.core import events as on
from tests.lab import Lab
from tests.lab.newest import NOT_BUILT, found
from tests.stories import acts
from tests.stories.patience import hurry, patient
from tests.stories.test_campaign import release_urgent_jobs
from tests.stories.test_first_hour import asked
from tests.training import Training, assert_complete

pytestmark = pytest.mark.slurm
NO_REQUEUE = "--no-requeue"


@pytest.mark.campaign
def test_a_job_that_slurm_may_not_requeue_is_submitted_again_and_goes_on(lab: Lab, reference: Training) -> None:
    """The same log, run directory, shape and arguments; the losses of one uninterrupted run."""
    shape = (NO_REQUEUE, "--time=30", "--comment=for ada")
    training = patient(lab, "resubmitted", after=12, sbatch_args=shape)
    training.wait_step(13)
    first = training.job_id

    lab.preempt(first)
    training.wait_event(on.RequeueAnswered)
    training.job_id = successor(training)
    hurry(training)
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
    for job in started:
        assert str(training.run_dir) in asked(training, "status", str(job)), "each job of the chain finds its run"
    assert "preempted" in asked(training, "explain", str(first))
    assert "finished" in asked(training, "explain", str(training.job_id))


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


@pytest.mark.campaign
def test_a_supervisor_killed_between_two_jobs_leaves_one_that_goes_on(lab_factory, reference: Training) -> None:
    """JobRequeue=0 in slurm.conf, and `kill -9` as the requeue is under way: one successor, never two, never none."""
    lab = lab_factory(grace_time_s=20, kill_wait_s=10, job_requeue=False)
    training = patient(lab, "between", after=12, sbatch_args=(NO_REQUEUE,))
    acts.requeueing(training)
    acts.kill_supervisor(training)
    training.until(lambda: len(ours(lab, training)) > 1, "the job in its place")
    hurry(training)
    release_urgent_jobs(lab)
    training.job_id = ours(lab, training)[-1]
    training.wait_end()

    assert len(ours(lab, training)) == 2, training.story()
    assert_complete(training, reference)


@pytest.mark.campaign
def test_a_killed_supervisors_job_is_submitted_again_by_a_watcher(lab: Lab, reference: Training) -> None:
    training = patient(lab, "rescued-anew", after=12, sbatch_args=(NO_REQUEUE,))
    training.wait_step(13)

    acts.kill_supervisor(training)
    training.until(lambda: len(ours(lab, training)) > 1, "the job in its place")
    hurry(training)
    training.job_id = ours(lab, training)[-1]
    training.wait_end()

    assert len(ours(lab, training)) == 2, training.story()
    assert_complete(training, reference)


def two_tasks(lab: Lab, name: str, *options: str) -> tuple[Training, dict[int, Training]]:
    """Submit an array of two, and wait until both train; return it, which may be told to hurry, and its tasks."""
    array = patient(
        lab, name, nodes=1,
        sbatch_args=("--array=3-4", "--ntasks-per-node=2", "--gres=gpu:2", *options),
        env={"STEPKEEPER_RUN_DIR": str(lab.workdir("games") / f"{name}-%A_%a")},
    )  # fmt: skip
    tasks = {}
    for number in (3, 4):
        tasks[number] = Training(lab, name=f"{name}-{array.job_id}_{number}", nodes=1)
        tasks[number].wait_step(5)
        tasks[number].job_id = tasks[number].events(on.AttemptStarted)[0].event.job_id
    return array, tasks


@pytest.mark.campaign
def test_each_task_of_an_array_is_a_run_of_its_own(lab: Lab, reference: Training) -> None:
    """Two tasks; one is preempted and requeued by its own name, and the other hears nothing of it."""
    array, tasks = two_tasks(lab, "array")

    lab.preempt(tasks[3].job_id)
    tasks[3].wait_event(on.RequeueAnswered)
    hurry(array)
    release_urgent_jobs(lab)
    for task in tasks.values():
        task.wait_end()

    assert [len(task.events(on.AttemptStarted)) for task in tasks.values()] == [2, 1], tasks[3].story()
    for task in tasks.values():
        assert_complete(task, reference)


@pytest.mark.campaign
def test_a_task_of_an_array_that_may_not_be_requeued_goes_on_as_an_array_of_its_own(
    lab: Lab, reference: Training
) -> None:
    """Its number stays the same for the script, and the run directory, whose name has the first array's id, too."""
    array, tasks = two_tasks(lab, "once", NO_REQUEUE)
    first = tasks[3].job_id

    lab.preempt(first)
    tasks[3].wait_event(on.RequeueAnswered)
    tasks[3].job_id = successor(tasks[3])
    hurry(array)
    release_urgent_jobs(lab)
    for task in tasks.values():
        task.wait_end()

    assert [len(task.events(on.AttemptStarted)) for task in tasks.values()] == [2, 1], tasks[3].story()
    assert lab.job(tasks[3].job_id).raw["ArrayTaskId"] == "3", tasks[3].story()
    assert str(tasks[3].run_dir) in asked(tasks[3], "status", str(first))
    for task in tasks.values():
        assert_complete(task, reference)


@pytest.mark.newest
def test_on_the_newest_slurm_too_and_pyslurm_that_is_not_there_is_no_reason_to_stop(
    lab_factory, reference: Training
) -> None:
    if found() is None:
        pytest.skip(NOT_BUILT)
    lab = lab_factory(slurm="newest", grace_time_s=20, kill_wait_s=10)
    env = {"STEPKEEPER_SLURM_CLIENT": "pyslurm"}
    training = patient(lab, "anew", after=12, sbatch_args=(NO_REQUEUE,), env=env)
    training.wait_step(13)

    lab.preempt(training.job_id)
    training.wait_event(on.RequeueAnswered)
    training.job_id = successor(training)
    hurry(training)
    release_urgent_jobs(lab)
    training.wait_end()

    assert training.output().count("for pyslurm does not fit") == 2, training.output()
    assert len(training.events(on.AttemptStarted)) == 2, training.story()
    assert_complete(training, reference)
