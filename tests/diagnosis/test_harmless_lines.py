"""A line that says nothing of the failure changes no verdict."""

from __future__ import annotations

import pytest

from tests.diagnosis.corpus import verdict

HARMLESS = (
    "INFO tracker: upload got HTTP status 503; retrying",
    "INFO AWS_IO_THREADS=4",
    "2026-01-01 INFO using google.cloud.storage.transport.Transport",
    "could not connect to the server, continuing offline",
    "metadata service: no termination notice received",
    "Preemptible VM, no preemption notice received",
    "Note: parameters are different across pipeline stages (expected)",
    "config: cuda_error_contained=retry",
    "grpc: Unable to reach peer (error 802), using fallback",
    "cache miss (error 803)",
    "slurmstepd: error: munge decode failed, retried",
    "RuntimeError: File /data/vocab.json cannot be opened",
    "[n1:1] PMIX ERROR: NOT-FOUND in file dstore_base.c at line 1567",
)
RAISED = """\
Traceback (most recent call last):
  File "/home/u/train.py", line 61, in main
    x = f()
ValueError: shapes do not match
"""
ENDS = {"an exception": RAISED, "a kill": "srun: error: n2: task 3: Killed\n", "nothing": "bye\n"}
STEPS = "".join(f"step {step} loss: 2.1\n" for step in range(29))


@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS.keys())
@pytest.mark.parametrize("line", HARMLESS)
def test_a_harmless_line_changes_no_verdict(line: str, end: str) -> None:
    alone, judged = verdict(f"start\n{end}"), verdict(f"start\n{line}\n{end}")

    raises = "Error: " in line  # this may be what ended it, where nothing else is there
    assert judged.cause is alone.cause or (raises and judged.cause.value == "exception"), judged


@pytest.mark.parametrize(
    "line",
    [
        "srun: error: Task launch for StepId=12.3 failed on node n1: Job credential expired",
        "slurmstepd: error: Detected 1 oom_kill event in StepId=12.3. Some of the step tasks have been OOM Killed.",
    ],
)
def test_an_error_that_training_outlived_is_not_why_it_ended(line: str) -> None:
    assert verdict(f"{line}\n{STEPS}{RAISED}").cause is verdict(RAISED).cause


def test_a_limit_of_slurm_is_why_it_ended_though_ranks_write_on() -> None:
    limit = "slurmstepd: error: *** JOB 12 ON n1 CANCELLED AT 2026-01-01T00:00:00 DUE TO TIME LIMIT ***"

    assert verdict(f"{limit}\n{STEPS}").cause.value == "time_limit"
