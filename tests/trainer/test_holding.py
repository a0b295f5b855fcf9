from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from stepkeeper_trainer.coordinate.agreement import Agreement
from stepkeeper_trainer.environment import Environment, read_environment
from stepkeeper_trainer.errors import RunDirectoryError, SupersededError
from stepkeeper_trainer.formats import lease
from stepkeeper_trainer.formats.lease import Birth, birth
from stepkeeper_trainer.store.run_directory import open_run_directory

BY_HAND = replace(read_environment({}), node="here")


def opened(run_dir: Path, environment: Environment = BY_HAND):
    return open_run_directory(run_dir, environment, Agreement(None, within_s=1.0), 0)


def held_by(run_dir: Path, *, pid: int, job_id: int = lease.NO_JOB, taken_at: float | None = None, **more: Birth):
    """Hold a run directory; without a birth as 0.1 did."""
    run_dir.mkdir(exist_ok=True)
    at = time.time() if taken_at is None else taken_at
    lease.write(
        run_dir,
        lease.Lease(job_id=job_id, restart_count=3, attempt=0, node="here", pid=pid, taken_at=at, **more),
    )


def known(pid: int) -> Birth:
    found = birth(pid)
    assert found is not None
    return found


def test_a_second_training_on_the_same_node_is_refused_while_the_first_lives(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        held_by(tmp_path / "run", pid=other.pid)
        with pytest.raises(RunDirectoryError, match=rf"process {other.pid} on here trains in it: wait"):
            opened(tmp_path / "run")
        other.kill()
        limit_at = time.monotonic() + 90
        while "Z" not in Path(f"/proc/{other.pid}/stat").read_text().rpartition(")")[2]:  # dead, and not buried
            assert time.monotonic() < limit_at
        commits = opened(tmp_path / "run")
    assert commits.environment.epoch == (lease.NO_JOB, 4)
    held = lease.read(tmp_path / "run")
    assert held is not None
    assert held.pid == os.getpid()


def test_two_trainings_of_one_job_do_not_share_a_default_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["train.py"])
    in_job = replace(BY_HAND, epoch=(7, 0))
    (tmp_path / "runs").mkdir()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        held_by(tmp_path / "runs/train-7", pid=other.pid, job_id=7, birth=known(other.pid))
        with pytest.raises(RunDirectoryError, match=rf"train-7: process {other.pid} on here trains in it"):
            open_run_directory(None, in_job, Agreement(None, within_s=1.0), 0)


@pytest.mark.parametrize("taken_at", [1.0, 4e9])
def test_a_clock_that_was_set_makes_no_holder_look_dead(tmp_path: Path, taken_at: float) -> None:
    """Decades forward, and back: what counts is when the kernel started the process."""
    held_by(tmp_path / "run", pid=os.getppid(), birth=known(os.getppid()), taken_at=taken_at)
    with pytest.raises(RunDirectoryError, match="trains in it"):
        opened(tmp_path / "run")


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(lambda now: Birth(now.boot, now.ticks + 2), id="number given again"),
        pytest.param(lambda now: Birth("5a0b5f0e-1ac1-4665-a228-000000000000", now.ticks), id="before a reboot"),
    ],
)
def test_a_process_that_was_born_otherwise_is_another_one(tmp_path: Path, other: Callable[[Birth], Birth]) -> None:
    held_by(tmp_path / "run", pid=os.getppid(), birth=other(known(os.getppid())), taken_at=4e9)
    assert opened(tmp_path / "run").environment.epoch == (lease.NO_JOB, 4)


def test_each_holder_says_when_it_was_born(tmp_path: Path) -> None:
    opened(tmp_path / "run")
    held = lease.read(tmp_path / "run")
    assert held is not None
    assert held.birth == birth(os.getpid())


def test_a_time_namespace_sees_the_same_birth() -> None:
    """A container may have clocks of its own, which the kernel adds to what it tells of starts."""
    program = f"from stepkeeper_trainer.formats.lease import birth; b = birth({os.getpid()}); print(b.boot, b.ticks)"
    away = ["unshare", "--user", "--time", "--boottime", "86400", "--fork", "--", sys.executable, "-c", program]
    done = subprocess.run(away, capture_output=True, text=True, timeout=60, check=False)
    if done.returncode and "unshare" in done.stderr:
        pytest.skip(f"no time namespaces here: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    boot, ticks = done.stdout.split()
    assert Birth(boot, int(ticks)).is_that_of(known(os.getpid()))
    assert "86400" not in Path("/proc/self/timens_offsets").read_text(), "we stayed outside"


def test_a_container_that_hides_the_boot_is_told_by_the_start_alone(tmp_path: Path) -> None:
    """Its own /proc, on a kernel without time namespaces; and names may hold anything."""
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "stat").write_text("7 (a) Z 1 (b) S 1 " + "0 " * 17 + "4242 0 0\n")
    assert birth(7, proc=tmp_path) == Birth("", 4242)
    assert Birth("", 4242).is_that_of(Birth("9fe5f050", 4242))
    assert birth(8, proc=tmp_path) is None


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
