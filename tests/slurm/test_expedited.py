"""A run that is over, in a job that Slurm would put back and hold: the job ends, and no other job is asked about."""

from __future__ import annotations

import os

import pytest

from stepkeeper.core.exits import ExitCode
from stepkeeper.slurm.client import SlurmError
from stepkeeper.slurm.launch import LEFT_TO_SLURM, let_end

BATCH = {"SLURM_JOB_ID": "7", "SLURM_TASK_PID": str(os.getpid())}


class Slurm:
    """Answers as 26.05 does, and keeps what it was asked."""

    def __init__(self, *, enabled: bool = True, expedited: str = "Yes") -> None:
        self.enabled, self.expedited = enabled, expedited
        self.asked: list[tuple[str, ...]] = []

    def __call__(self, *words: str) -> str:
        self.asked.append(words)
        if words[1:3] == ("show", "config"):
            return f"SlurmctldParameters     = {'enable_expedited_requeue' if self.enabled else '(null)'}\n"
        if "show" in words:
            return f"JobId=7 JobName=ExpeditedRequeue=Yes,no ExpeditedRequeue={self.expedited}\n"
        return ""


@pytest.mark.parametrize("code", [code for code in ExitCode if code not in LEFT_TO_SLURM])
def test_a_job_of_a_run_that_is_over_ends(code: ExitCode) -> None:
    slurm = Slurm()

    assert "job 7 has expedited requeue" in let_end(code, BATCH, slurm)
    assert slurm.asked[-1] == ("scontrol", "update", "JobId=7", "Requeue=0")


@pytest.mark.parametrize("code", sorted(LEFT_TO_SLURM))
def test_a_run_that_goes_on_costs_no_call(code: ExitCode) -> None:
    slurm = Slurm()

    assert let_end(code, BATCH, slurm) == ""
    assert slurm.asked == []


@pytest.mark.parametrize(
    ("slurm", "environment", "calls"),
    [
        pytest.param(Slurm(enabled=False), BATCH, 1, id="a site without it"),
        pytest.param(Slurm(expedited="No"), BATCH, 2, id="a job without it"),
        pytest.param(Slurm(), {"SLURM_JOB_ID": "7", "SLURM_TASK_PID": "1"}, 0, id="not the batch process"),
        pytest.param(Slurm(), {}, 0, id="no job"),
    ],
)
def test_other_jobs_are_left_alone(slurm: Slurm, environment: dict[str, str], calls: int) -> None:
    assert let_end(ExitCode.STOPPED, environment, slurm) == ""
    assert len(slurm.asked) == calls


def test_a_task_goes_by_its_own_name() -> None:
    slurm = Slurm()
    let_end(ExitCode.STOPPED, {**BATCH, "SLURM_ARRAY_JOB_ID": "5", "SLURM_ARRAY_TASK_ID": "3"}, slurm)

    assert slurm.asked[-1] == ("scontrol", "update", "JobId=5_3", "Requeue=0")


def test_a_slurm_that_does_not_answer_adds_no_words_to_why_the_run_is_over() -> None:
    def silent(*_: str) -> str:
        raise SlurmError("no answer")

    assert let_end(ExitCode.STOPPED, BATCH, silent) == ""
