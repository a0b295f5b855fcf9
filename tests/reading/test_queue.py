"""What `stepkeeper status` tells of a job that waits, or does not wait any more."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from stepkeeper.core import events as on
from stepkeeper.core.state import Phase
from stepkeeper.run_store.paths import RunDirectory
from tests.reading import build
from tests.reading.conftest import Command

Squeue = Callable[[str], None]


@pytest.fixture
def squeue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Squeue:
    """Let Slurm's command be a script that writes its arguments down first."""
    place = tmp_path / "bin"
    place.mkdir()
    monkeypatch.setenv("PATH", f"{place}:{os.environ['PATH']}")

    def become(script: str) -> None:
        (place / "squeue").write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\n{script}\n')
        (place / "squeue").chmod(0o755)

    return become


@pytest.fixture
def requeued(run: RunDirectory) -> RunDirectory:
    build.write_status(run, phase="done", exit_code=10, why="preempted", updated_at=time.time())
    return run


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        ("12|PENDING|N/A|Resources", "job 12 is PENDING (Resources): Slurm shows no expected start yet"),
        ("12|PENDING|1|Priority", "job 12 is PENDING (Priority): Slurm shows no expected start yet"),
        ("12|PENDING|N/A|JobHeldUser", "(JobHeldUser): it waits until somebody does `scontrol release 12`"),
        ("12|PENDING|N/A|JobHeldAdmin", "(JobHeldAdmin): it waits until an administrator does `scontrol release 12`"),
        ("12|PENDING|N/A|launch failed requeued held", "held): it waits until somebody does `scontrol release 12`"),
        ("12|COMPLETING|1790000000|None", "job 12 is COMPLETING\n"),
        ("12|RUNNING|1790000000|None", "job 12 is RUNNING\n"),
    ],
)
def test_a_run_that_was_requeued_shows_what_its_job_waits_for(
    command: Command, squeue: Squeue, requeued: RunDirectory, answer: str, told: str
) -> None:
    squeue(f"echo '{answer}'")

    said = command("status", requeued.path).out

    assert told in said
    assert "to continue" not in said


def test_when_slurm_plans_to_start_it_is_said(command: Command, squeue: Squeue, requeued: RunDirectory) -> None:
    squeue(f"echo '12|PENDING|{time.time() + 2 * 3600 + 115:.0f}|Resources'")

    assert "job 12 is PENDING (Resources): expected to start in 2 h 01 min (" in command("status", requeued.path).out


@pytest.mark.parametrize(
    ("script", "told"),
    [
        ("echo '12|CANCELLED|N/A|None'", "job 12 is CANCELLED: it does not continue without you"),
        ("echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1", "job 12 is not in the queue any more"),
        ("true", "`sacct -j 12` shows how it ended"),
    ],
)
def test_a_job_that_nobody_will_see_again_is_said_and_how_to_go_on(
    command: Command, squeue: Squeue, requeued: RunDirectory, script: str, told: str
) -> None:
    squeue(script)

    said = command("status", requeued.path).out

    assert told in said
    assert f"to continue: stepkeeper resume {requeued.path}" in said


def test_where_slurm_does_not_answer_nothing_is_concluded(
    command: Command, squeue: Squeue, requeued: RunDirectory
) -> None:
    squeue("echo 'slurm_load_jobs error: Unable to contact slurm controller' >&2; exit 1")

    said = command("status", requeued.path)

    assert said.code == 0
    assert "nothing: squeue: slurm_load_jobs error: Unable to contact slurm controller" in said.out
    assert "to continue" not in said.out


def test_the_job_that_was_submitted_in_its_place_is_asked_for(
    command: Command, squeue: Squeue, requeued: RunDirectory, tmp_path: Path
) -> None:
    answered = on.RequeueAnswered(at=build.START + 60, ok=True, job_id=13)
    build.write_journal(requeued, [*build.story(requeued), build.record(answered, phase=Phase.REQUEUEING)])
    squeue("echo '13|PENDING|N/A|Dependency'")

    document = json.loads(command("status", requeued.path, "--json").out)

    assert document["queue"] == {
        "job": "13", "state": "PENDING", "reason": "Dependency", "expected_at": None, "error": ""
    }  # fmt: skip
    assert "--jobs=13" in (tmp_path / "asked").read_text()


def test_a_run_that_fell_silent_shows_what_slurm_says(command: Command, squeue: Squeue, run: RunDirectory) -> None:
    squeue("echo '12|SUSPENDED|1790000000|None'")
    build.write_status(run, updated_at=time.time() - 3662)

    assert "job 12 is SUSPENDED" in command("status", run.path).out


def test_slurm_is_not_asked_for_a_run_that_works_or_is_over(
    command: Command, squeue: Squeue, run: RunDirectory, tmp_path: Path
) -> None:
    squeue("exit 1")
    for changes in ({}, {"phase": "done", "exit_code": 0}, {"phase": "done", "exit_code": 27}):
        build.write_status(run, updated_at=time.time(), **changes)
        assert "Slurm says" not in command("status", run.path).out

    assert not (tmp_path / "asked").exists()
