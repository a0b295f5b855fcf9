"""Unmodified scripts of four frameworks that run into their time limit."""

from __future__ import annotations

import pytest

from tests.lab import Lab
from tests.stories import framework_jobs as jobs
from tests.stories.framework_jobs import Job, Script

pytestmark = [pytest.mark.slurm, pytest.mark.frameworks, pytest.mark.campaign]


@jobs.each_script
def test_a_script_runs_into_its_time_limit_and_loses_no_step(lab: Lab, kind: Script) -> None:
    """A minute a job, and steps that take longer: no machine is through before.

    Where the script saves by itself, it is known by its first save.  On a slow machine a job may end before that.
    """
    job = Job(
        lab, name=f"{kind.framework}-limit", kind=kind, length=20, step_s=3.0, evaluates_at=1000,
        sbatch_args=("--time=1", "--signal=B:USR2@1"), arguments=kind.no_evaluation,
    )  # fmt: skip
    aborts = kind is jobs.HUGGINGFACE  # once, as gloo's threads do in the interpreter's exit
    job.begin(**({"TEST_ABORTS": "1"} if aborts else {}))
    job.wait_end(480.0)

    assert lab.job(job.job_id).state == "COMPLETED", job.story()
    assert ("failed_after_last_step" in job.output()) == aborts, job.story()
    assert len(job.segments()) >= 2, job.story()
    segments = job.segments()
    while kind in (jobs.ACCELERATE, jobs.DEEPSPEED) and len(segments[0].steps) < int(jobs.SAVES_EVERY):
        segments = segments[1:]
    steps = [step for segment in segments for step in segment.steps]
    assert steps == list(range(1, 21)), f"a step was lost or done twice\n{job.story()}"
