from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from stepkeeper_trainer.agreement import Agreement
from stepkeeper_trainer.attach import open_run_directory
from stepkeeper_trainer.environment import Environment, read_environment
from stepkeeper_trainer.errors import RunDirectoryError, SupersededError
from stepkeeper_trainer.formats import lease

BY_HAND = replace(read_environment({}), node="here")


def opened(run_dir: Path, environment: Environment = BY_HAND):
    return open_run_directory(run_dir, environment, Agreement(None), 0)


def held_by(run_dir: Path, *, pid: int, node: str = "here", job_id: int = lease.NO_JOB, taken_at: float | None = None):
    run_dir.mkdir(exist_ok=True)
    at = time.time() if taken_at is None else taken_at
    lease.write(
        run_dir,
        lease.Lease(job_id=job_id, restart_count=3, attempt=0, node=node, pid=pid, taken_at=at),
    )


def test_a_second_training_on_the_same_node_is_refused_while_the_first_lives(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        held_by(tmp_path / "run", pid=other.pid)
        with pytest.raises(RunDirectoryError, match=rf"process {other.pid} on here trains in it: wait"):
            opened(tmp_path / "run")
        other.kill()
        limit_at = time.monotonic() + 20
        while "Z" not in Path(f"/proc/{other.pid}/stat").read_text().rpartition(")")[2]:  # dead, and not buried
            assert time.monotonic() < limit_at
        commits = opened(tmp_path / "run")
    assert commits.environment.epoch == (lease.NO_JOB, 4)
    held = lease.read(tmp_path / "run")
    assert held is not None
    assert held.pid == os.getpid()


def test_another_process_of_the_same_number_refuses_nobody(tmp_path: Path) -> None:
    held_by(tmp_path / "run", pid=os.getppid(), taken_at=1.0)  # before that one was started
    assert opened(tmp_path / "run").environment.epoch == (lease.NO_JOB, 4)


def test_a_training_that_was_started_later_on_another_node_fences_the_first_off(tmp_path: Path) -> None:
    first = opened(tmp_path / "run")
    second = opened(tmp_path / "run", replace(BY_HAND, node="there"))
    second.check_fence()
    with pytest.raises(SupersededError, match="a training that was started later"):
        first.check_fence()


def test_what_a_slurm_job_held_is_not_counted_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    held_by(tmp_path / "run", pid=1, job_id=77)
    assert opened(tmp_path / "run").environment.epoch is None
    assert "run_directory_of_a_job job=77" in caplog.text
    held = lease.read(tmp_path / "run")
    assert held is not None
    assert held.job_id == 77
