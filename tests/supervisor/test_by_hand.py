"""Where a supervisor may run besides a batch script, and what it goes by there."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace

import msgspec
import pytest
import structlog
from structlog.testing import capture_logs

from stepkeeper.cli import run
from stepkeeper.core.events import JobFacts, JobState
from stepkeeper.core.exits import ExitCode
from stepkeeper.errors import StepkeeperError
from stepkeeper.log import is_empty
from stepkeeper.run_store import lease as run_store_lease
from stepkeeper.slurm.launch import is_batch_process, read_allocation, require_no_batch_script
from stepkeeper.submit import own_script
from stepkeeper.watcher.rescue import rescue
from stepkeeper_trainer.formats.lease import Lease
from tests.supervisor.test_rescue import RUNNING, Slurm, assignment

JOB = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]"}
STEP = {**JOB, "SLURM_STEP_ID": "0", "SLURM_TASK_PID": "1", "SLURM_STEP_NUM_TASKS": "1"}
__all__ = ["assignment"]  # a fixture


@pytest.fixture(autouse=True)
def slurm_on_path(tmp_path, monkeypatch):
    for name in ("srun", "scontrol", "scancel"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")


@pytest.mark.parametrize("numbered", [{}, {"SLURM_STEP_ID": "-5", "SLURM_NTASKS": "16"}])
def test_a_batch_script_in_whose_place_we_are(numbered):
    """Newer Slurms number its step, too."""
    ours = {**JOB, **numbered, "SLURM_TASK_PID": str(os.getpid()), "SLURM_CPUS_PER_TASK": "3"}

    assert is_batch_process(ours)
    assert read_allocation(ours, Names(), 1).cpus_per_task == 3


def test_salloc_and_a_bare_srun_of_one_task_are_no_batch_scripts():
    assert not is_batch_process(JOB)
    assert not is_batch_process(STEP)
    assert not is_batch_process({**STEP, "SLURM_STEP_ID": "-6", "SLURM_STEP_NUM_TASKS": "2"}), "the shell of salloc"


@pytest.mark.parametrize(
    ("environment", "says"),
    [
        ({**JOB, "SLURM_TASK_PID": "1"}, "not the batch process"),
        ({**JOB, "SLURM_TASK_PID": "1", "SLURM_STEP_ID": "-5"}, "not the batch process"),
        ({**STEP, "SLURM_STEP_NUM_TASKS": "2"}, "starts 2 supervisors"),
    ],
)
def test_where_signals_would_reach_somebody_else_it_does_not_start(environment, says):
    with pytest.raises(StepkeeperError, match=says) as refused:
        is_batch_process(environment)

    assert refused.value.code is ExitCode.NOT_BATCH_PROCESS


def test_a_slurm_step_of_a_batch_job_is_refused():
    of_batch = JobFacts(state=JobState.RUNNING, slurm_state="RUNNING", restarts=0)
    require_no_batch_script(JobFacts(state=JobState.RUNNING, slurm_state="RUNNING", restarts=0, batch=False))

    with pytest.raises(StepkeeperError, match="not the batch process"):
        require_no_batch_script(of_batch)


class Names:
    """Expands one list."""

    def hostnames(self, node_list):
        assert node_list == "n[1-2]"
        return ("n1", "n2")


def test_the_shape_of_a_bare_sruns_own_task_is_not_that_of_the_ranks():
    told = {**STEP, "SLURM_CPUS_PER_TASK": "4", "SLURM_JOB_CPUS_PER_NODE": "4(x2)"}

    found = read_allocation(told, Names(), 2)

    assert (found.tasks_per_node, found.cpus_per_task, found.overcommit) == (2, 2, False)


@pytest.mark.parametrize(
    ("asked", "cpus", "shape"),
    [
        ({"SLURM_NTASKS": "8", "SLURM_TASKS_PER_NODE": "4(x2)"}, "4(x2)", (4, 1)),  # sbatch -N2 -n8
        ({"SLURM_NTASKS": "8", "SLURM_TASKS_PER_NODE": "4(x2)", "SLURM_CPUS_PER_TASK": "2"}, "8(x2)", (4, 2)),
        ({"SLURM_NTASKS": "2", "SLURM_TASKS_PER_NODE": "1(x2)"}, "16(x2)", (1, 16)),
        ({"SLURM_NTASKS": "2", "SLURM_GPUS_ON_NODE": "4"}, "16(x2)", (4, 4)),
        ({"SLURM_NTASKS": "8", "SLURM_NTASKS_PER_NODE": "2"}, "4(x2)", (2, 2)),
        ({"SLURM_NTASKS_PER_NODE": "2"}, "2,64", (2, 1)),
        ({}, "16(x2)", (1, 16)),
    ],
)
def test_ranks_are_as_the_job_asks_for_tasks_and_have_cpus_on_each_node(asked, cpus, shape):
    told = {**JOB, "SLURM_TASK_PID": "1", "SLURM_JOB_CPUS_PER_NODE": cpus, **asked}

    found = read_allocation(told, Names(), None)

    assert (found.tasks_per_node, found.cpus_per_task, found.overcommit, found.uneven_tasks) == (*shape, False, "")


@pytest.mark.parametrize(
    ("tasks", "shares", "cpus"),
    [("8", "7,1", "7,1"), ("9", "7,2", "8,2"), ("5", "3,2", "3,2")],  # 8 tasks of 2 nodes need not be 4 on each
)
def test_tasks_that_slurm_does_not_share_evenly_are_no_ranks_and_are_warned_of(tasks, shares, cpus):
    told = {**JOB, "SLURM_NTASKS": tasks, "SLURM_TASKS_PER_NODE": shares, "SLURM_JOB_CPUS_PER_NODE": cpus}

    found = read_allocation(told, Names(), None)

    assert (found.tasks_per_node, found.overcommit, found.uneven_tasks) == (1, False, shares)
    assert read_allocation(told, Names(), 2).uneven_tasks == ""
    job = SimpleNamespace(assignment=SimpleNamespace(batch=True))
    with capture_logs() as said:
        run._say_what_surprises(structlog.get_logger(), job, found, own_script.Doubts(), emptied=False, merged=0)
    assert [(line["event"], line["ask_for"]) for line in said] == [("tasks_not_even", "sbatch --ntasks-per-node")]
    assert shares in said[0]["why"]


def test_a_supervisor_on_a_login_node_counts_the_first_node_as_the_batch_node():
    assert read_allocation(JOB, Names(), 1).batch_node == "n1"


def lease(pid: int, node: str = "n1") -> Lease:
    return Lease(job_id=7, restart_count=0, attempt=0, node=node, pid=pid, taken_at=0.0)


def test_in_one_allocation_a_run_starts_again_when_its_supervisor_is_gone(tmp_path):
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait(30)
    run_store_lease.take(tmp_path, lease(gone.pid), job_runs=lambda _: True)

    assert run_store_lease.take(tmp_path, lease(os.getpid()), job_runs=lambda _: True).attempt == 1
    with pytest.raises(StepkeeperError, match="has a supervisor already"):
        run_store_lease.take(tmp_path, lease(gone.pid), job_runs=lambda _: True)


def test_a_supervisor_on_another_node_is_not_taken_for_gone(tmp_path):
    run_store_lease.take(tmp_path, lease(2**22 + 1, node="n2"), job_runs=lambda _: True)

    with pytest.raises(StepkeeperError, match="has a supervisor already"):
        run_store_lease.take(tmp_path, lease(os.getpid()), job_runs=lambda _: True)


def test_a_watcher_does_not_try_to_requeue_what_has_no_batch_script(assignment):
    by_hand = msgspec.structs.replace(assignment, batch=False)
    slurm = Slurm(RUNNING)

    result = rescue(by_hand, "n1", gone=True, client=slurm)

    assert result.done
    assert "run again" in result.why
    assert slurm.called == []


def test_a_log_in_which_nothing_stands(tmp_path):
    (tmp_path / "kept").write_text("of the attempt before\n")
    with (tmp_path / "emptied").open("w") as emptied, (tmp_path / "kept").open("a") as kept:
        assert is_empty(emptied)
        assert not is_empty(kept)
    assert not is_empty(emptied), "closed"
    reader, writer = os.pipe()
    with os.fdopen(reader), os.fdopen(writer, "w") as pipe:
        assert not is_empty(pipe)
