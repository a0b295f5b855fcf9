"""Unmodified scripts of four frameworks, recognised by themselves: preempted at each moment, killed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import stepkeeper_trainer
from stepkeeper.core import events as on
from stepkeeper.core.exits import ExitCode
from tests.lab import Lab
from tests.stories import acts
from tests.stories import framework_jobs as jobs
from tests.stories.framework_jobs import Job, Script
from tests.stories.test_campaign import release_urgent_jobs, start_lost_nodes

pytestmark = [pytest.mark.slurm, pytest.mark.frameworks, pytest.mark.campaign]


@jobs.each_script
def test_a_script_goes_on_whatever_befalls_it_and_a_notice_costs_no_step(lab: Lab, kind: Script) -> None:
    """Preempted in its warm-up, in training and in an evaluation; then killed in a save, from outside."""
    expected = jobs.whole(lab, kind)
    with jobs.another_file_system() as elsewhere:
        job = Job(lab, name=f"{kind.framework}-all", kind=kind, step_s=0.25).begin(**elsewhere)
        for number, act in enumerate(
            (jobs.preempted_in_warm_up, jobs.preempted_in_training, jobs.preempted_in_evaluation)
        ):
            job.until_started(number + 1)
            act(job)
            job.wait_attempt(number + 1)
            release_urgent_jobs(lab)
        job.until_started(4)
        torn = killed_until_torn(job)
        job.wait_end(300.0)

    assert lab.job(job.job_id).state == "COMPLETED", job.story()
    assert job.exits()[-1] == ExitCode.FINISHED, job.story()
    warm_up, training, evaluation, *_ = segments = job.segments()
    assert warm_up.steps == [], job.story()
    saved = [each.event for each in job.events(on.CheckpointCommitted)]
    asked = [each.step for each in saved if isinstance(each, on.CheckpointCommitted) and each.emergency]
    assert asked[-1:] == [evaluation.steps[-1]], job.story()
    assert set(asked) <= {training.steps[-1], evaluation.steps[-1]}, job.story()  # or the script had just saved
    evaluating = f"evaluating {jobs.EVALUATES_AT}"
    assert evaluating in (evaluation.rows[-1:] if kind.saves_in_evaluation else evaluation.rows), job.story()
    assert training.steps + evaluation.steps + segments[3].steps == list(range(1, segments[3].steps[-1] + 1)), (
        f"a step was lost or done twice at a notice\n{job.story()}"
    )
    assert torn in job.passed_over(), job.story()
    assert segments[-1].steps[0] == (job.chosen()[-1] or 0) + 1, job.story()
    assert segments[-1].steps[0] > evaluation.steps[-1], job.story()
    assert job.losses() == expected, job.story()
    assert "framework_recognized" in job.output(), job.output()


def killed_until_torn(job: Job, act: Callable[[Job, int], None] = jobs.killed_in_a_save) -> str:
    """Kill a rank in a save; where it was through by then, in the next one.  Return the name of what is left."""
    job.until_started(1)
    # beyond what a notice in the evaluation saves
    for step in range(5 * jobs.SAVES_EVERY, jobs.STEPS, jobs.SAVES_EVERY):
        starts = job.starts()
        act(job, step)
        job.until_started(starts + 1)
        if job.checkpoint(step).name in job.passed_over():
            return job.checkpoint(step).name
    raise AssertionError(f"each save was through before the kill\n{job.story()}")


def test_a_script_that_saves_by_our_library_goes_on_bit_for_bit(lab: Lab) -> None:
    """Preempted in training, then out of time: it has the losses of the script as it was, and does no step twice."""
    kind = jobs.HUGGINGFACE
    expected = jobs.whole(lab, kind, "as-it-was", evaluates_at=1000)
    ours = "from stepkeeper_trainer.engines.huggingface import save_with_stepkeeper\nsave_with_stepkeeper(trainer)\n"
    job = Job(
        lab, name="huggingface-ours", kind=kind, attach="off", step_s=2.2, evaluates_at=1000,
        change=("trainer.train(", f"{ours}trainer.train("), sbatch_args=("--time=1", "--signal=B:USR2@1"),
        arguments=kind.no_evaluation,
    ).begin(PYTHONPATH=str(Path(stepkeeper_trainer.__file__).parent.parent))  # fmt: skip
    job.until_step(2)
    acts.preempt(job)
    job.wait_attempt(1)
    release_urgent_jobs(lab)
    job.wait_end(300.0)

    assert lab.job(job.job_id).state == "COMPLETED", job.story()
    assert job.exits()[-1] == ExitCode.FINISHED, job.story()
    segments = job.segments()
    assert len(segments) >= 3, job.story()
    assert [step for each in segments for step in each.steps] == list(range(1, jobs.STEPS + 1)), job.story()
    saved = [each.event for each in job.events(on.CheckpointCommitted)]
    asked = {each.step for each in saved if isinstance(each, on.CheckpointCommitted) and each.emergency}
    left_at = {step for each in segments[:-1] for step in each.steps[-1:]}
    assert left_at <= asked | set(range(0, jobs.STEPS, jobs.SAVES_EVERY)), job.story()
    assert job.losses() == expected, job.story()
    assert not list(job.out.glob("checkpoint-*")), job.story()


def test_repaired_pointers_have_a_script_resume_that_knows_no_stepkeeper(lab: Lab) -> None:
    """`latest` names a checkpoint that the last rank has not written: DeepSpeed would end with an error, each time."""
    kind = jobs.DEEPSPEED
    expected = jobs.whole(lab, kind, "pointed")
    job = Job(lab, name="deepspeed-repaired", kind=kind, attach="off", run_args=("--repair-pointers",)).begin()

    torn = killed_until_torn(job, jobs.killed_before_the_last_rank_has_saved)
    job.wait_end(300.0)

    assert lab.job(job.job_id).state == "COMPLETED", job.story()
    [repaired] = [line for line in job.output().splitlines() if "pointer_repaired" in line]
    assert f"named={torn}" in repaired, repaired
    resumed = job.chosen()[-1]
    assert resumed is not None, job.story()
    assert f"names=global_step{resumed}" in repaired, repaired
    assert job.segments()[-1].steps[0] == resumed + 1, job.story()
    assert job.losses() == expected, job.story()


def test_a_zero_job_goes_on_with_fewer_ranks_and_with_more(lab_factory: Callable[..., Lab]) -> None:
    """A node is lost and none is free: one is enough, once the checkpoint is converted.  Then both are there again."""
    kind = jobs.DEEPSPEED
    lab = lab_factory(nodes=2, slurmd_timeout_s=5, grace_time_s=20, kill_wait_s=10)
    expected = jobs.whole(lab, kind, "of-two")
    job = Job(lab, name="deepspeed-elastic", kind=kind, run_args=("--min-nodes", "1"), step_s=0.5).begin()
    job.until_step(jobs.SAVES_EVERY + 2)
    acts.lose_node(job)
    job.until_started(2)
    job.until_step(jobs.SAVES_EVERY + 4)
    start_lost_nodes(lab)
    acts.requeue_by_admin(job)
    job.wait_attempt(1, 300.0)
    job.wait_end(300.0)

    assert lab.job(job.job_id).state == "COMPLETED", job.story()
    sizes = [len(nodes) for nodes in job.launches()]
    # a minute later, Slurm may repeat its order to end the attempt before on the node that was away: one launch more
    assert sizes in ([2, 1, 2], [2, 1, 2, 2]), job.story()
    made = [line for line in job.output().splitlines() if "checkpoint_converted:" in line]
    assert ["saved_by=2" in line and "ranks=1" in line for line in made] == [True, False], made
    assert "saved_by=1" in made[1] and "ranks=2" in made[1], made  # noqa: PT018
    resumed = [segment.steps[0] - 1 for segment in job.segments()]
    assert resumed == [step or 0 for step in job.chosen()], job.story()
    assert resumed[1:] != [0, 0], job.story()
    losses = {step: float.fromhex(loss) for step, loss in job.losses().items()}
    assert losses == pytest.approx({step: float.fromhex(loss) for step, loss in expected.items()}, rel=1e-3)
