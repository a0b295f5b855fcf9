"""The list of this user's runs: a job id finds its run from anywhere."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from stepkeeper.errors import StepkeeperError
from stepkeeper.run_store import find
from stepkeeper_trainer.formats import lease


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    home = tmp_path / "home"
    home.mkdir()
    return {"HOME": str(home)}


def a_run(path: Path, job_id: int) -> Path:
    path.mkdir(parents=True)
    held = lease.Lease(job_id=job_id, restart_count=0, attempt=0, node="n1", pid=1, taken_at=1.0)
    lease.write(path, held)
    return path


def test_a_job_id_finds_a_run_that_lies_anywhere(
    tmp_path: Path, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = a_run(tmp_path / "scratch" / "a run", 77)
    find.remember(run, environment)
    monkeypatch.chdir(tmp_path / "home")
    assert find.find("77", environment).path == run
    with pytest.raises(StepkeeperError, match="job 78: no run directory found"):
        find.find("78", environment)


def test_runs_that_are_gone_are_not_named(tmp_path: Path, environment: dict[str, str]) -> None:
    kept, gone = a_run(tmp_path / "kept", 1), a_run(tmp_path / "gone", 2)
    for run in (kept, gone):
        find.remember(run, environment)
    (gone / lease.LEASE_NAME).unlink()
    gone.rmdir()
    assert find.registered(environment) == [kept]


def test_only_the_newest_are_kept(tmp_path: Path, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(find, "REGISTERED_MAX", 3)
    made = [a_run(tmp_path / str(number), number) for number in range(5)]
    for age, run in enumerate(made):
        find.remember(run, environment)
        newest = max(find.registry(environment).iterdir(), key=lambda file: file.stat().st_mtime_ns)  # type: ignore[union-attr]
        os.utime(newest, (age, age))
    find.remember(made[-1], environment)
    assert find.registered(environment) == [made[4], made[3], made[2]]


def test_what_somebody_else_has_put_there_harms_nobody(tmp_path: Path, environment: dict[str, str]) -> None:
    run = a_run(tmp_path / "run", 5)
    find.remember(run, environment)
    directory = find.registry(environment)
    assert directory is not None
    (directory / "torn").write_bytes(b"\0\0")
    (directory / "relative").write_bytes(b"run")
    (directory / "json").write_text(json.dumps({"run": 1}))
    assert find.registered(environment) == [run]


def test_without_a_home_nothing_is_noted_and_nothing_fails(tmp_path: Path) -> None:
    find.remember(tmp_path, {})
    assert find.registered({}) == []
