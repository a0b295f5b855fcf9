"""Who may act for a run: the lease, taken, refused, superseded."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import msgspec
import pytest

from stepkeeper.core.exits import ExitCode
from stepkeeper.errors import StepkeeperError
from stepkeeper.run_store import lease as run_store_lease
from stepkeeper_trainer.formats import lease as leases
from stepkeeper_trainer.formats.lease import Birth, Lease, birth


def lease(job: int = 7, restarts: int = 0, *, attempt: int = 0, pid: int = 100) -> Lease:
    return Lease(job_id=job, restart_count=restarts, attempt=attempt, node="n1", pid=pid, taken_at=1.0)


class Slurm:
    """Knows which jobs run, and counts how often it was asked."""

    def __init__(self, *running: int) -> None:
        self.running = running
        self.asked: list[int] = []

    def job_runs(self, job_id: int) -> bool:
        self.asked.append(job_id)
        return job_id in self.running


def take(directory: Path, wanted: Lease, slurm: Slurm | None = None) -> Lease:
    return run_store_lease.take(directory, wanted, job_runs=(slurm or Slurm()).job_runs)


def test_the_first_attempt_takes_the_lease(tmp_path: Path) -> None:
    taken = take(tmp_path, lease())

    assert leases.read(tmp_path) == taken == lease()


def test_a_requeued_job_takes_over_from_itself_without_asking_slurm(tmp_path: Path) -> None:
    slurm = Slurm(7)
    take(tmp_path, lease(7, 0))

    taken = take(tmp_path, lease(7, 1, pid=200), slurm)

    assert (taken.attempt, slurm.asked) == (1, [])


def test_the_attempt_is_above_the_holders_also_without_a_journal(tmp_path: Path) -> None:
    take(tmp_path, lease(7, 0, attempt=4))

    assert take(tmp_path, lease(7, 1, attempt=0)).attempt == 5
    assert take(tmp_path, lease(7, 2, attempt=9)).attempt == 9


def test_another_jobs_second_supervisor_is_refused_while_the_holder_lives(tmp_path: Path) -> None:
    take(tmp_path, lease(7))
    slurm = Slurm(7)

    with pytest.raises(StepkeeperError, match=r"job 7 on n1 works on this run.*scancel 7") as caught:
        take(tmp_path, lease(8), slurm)

    assert caught.value.code is ExitCode.RUN_BUSY
    assert slurm.asked == [7]  # once
    held = leases.read(tmp_path)
    assert held is not None
    assert held.job_id == 7


def test_another_job_goes_on_with_a_run_whose_job_is_over(tmp_path: Path) -> None:
    take(tmp_path, lease(7, 3, attempt=3))

    taken = take(tmp_path, lease(8))

    assert (taken.epoch, taken.attempt) == ((8, 0), 4)


def test_an_older_job_does_not_take_a_run_back(tmp_path: Path) -> None:
    take(tmp_path, lease(8))

    with pytest.raises(StepkeeperError, match="took this run over") as caught:
        take(tmp_path, lease(7, 5))

    assert caught.value.code is ExitCode.SUPERSEDED


def test_a_second_supervisor_of_the_same_attempt_is_refused(tmp_path: Path) -> None:
    take(tmp_path, lease(7, 0, pid=os.getppid()))

    with pytest.raises(StepkeeperError, match=f"pid {os.getppid()}") as caught:
        take(tmp_path, lease(7, 0, pid=os.getpid()))

    assert caught.value.code is ExitCode.RUN_BUSY


def test_a_supervisor_that_has_ended_gives_the_attempt_to_the_next_one_on_its_host(tmp_path: Path) -> None:
    with subprocess.Popen(["true"]) as ended:
        pass
    take(tmp_path, lease(7, 0, pid=ended.pid))

    assert take(tmp_path, lease(7, 0, pid=os.getpid())).pid == os.getpid()


def test_another_process_of_the_supervisors_number_holds_nothing(tmp_path: Path) -> None:
    """In one `salloc` the same line again: the number of the supervisor before has been given to somebody."""
    now = birth(os.getppid())
    assert now is not None
    held = msgspec.structs.replace(lease(pid=os.getppid()), birth=Birth(now.boot, now.ticks - 2))
    leases.write(tmp_path, held)

    taken = take(tmp_path, msgspec.structs.replace(lease(pid=os.getpid()), birth=birth(os.getpid())))

    assert leases.read(tmp_path) == taken
    assert taken.birth == birth(os.getpid())


def test_a_lease_that_does_not_parse_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "lease.json").write_bytes(b"{torn")

    with pytest.raises(StepkeeperError, match="remove the file") as caught:
        take(tmp_path, lease())

    assert caught.value.code is ExitCode.RUN_DIRECTORY


def test_a_run_directory_that_is_gone_is_an_error_not_a_traceback(tmp_path: Path) -> None:
    with pytest.raises(StepkeeperError, match="cannot be taken"):
        take(tmp_path / "gone", lease())


def test_the_higher_epoch_supersedes_by_job_id_then_restart_count(tmp_path: Path) -> None:
    for newer in (lease(7, 1), lease(8, 0)):
        leases.write(tmp_path, newer)
        assert run_store_lease.superseded(tmp_path, lease(7, 0)) == newer


def test_the_newer_attempt_puts_its_lease_back_when_an_older_one_overwrote_it(tmp_path: Path) -> None:
    """Both read, then both wrote: the race that a lease without locks cannot rule out heals itself."""
    newer, older = lease(7, 1, attempt=1), lease(7, 0)
    leases.write(tmp_path, older)

    assert run_store_lease.superseded(tmp_path, newer) is None
    assert leases.read(tmp_path) == newer
    assert run_store_lease.superseded(tmp_path, older) == newer


def test_a_removed_lease_is_put_back(tmp_path: Path) -> None:
    assert run_store_lease.superseded(tmp_path, lease()) is None
    assert leases.read(tmp_path) == lease()
