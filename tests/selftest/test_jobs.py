"""The jobs of a self-test where one is submitted again in place of a requeue, or Slurm forgets the old ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from stepkeeper.core.events import JobState
from stepkeeper.slurm.client import SlurmError
from stepkeeper.submit import selftest
from tests.submit.clusters import Answering

ENDED, RUNNING, PENDING = JobState.ENDED, JobState.RUNNING, JobState.PENDING


@pytest.fixture
def listing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What `squeue` prints; as long as it is empty, it says that nobody answers."""
    file = tmp_path / "listing"
    file.touch()
    squeue = tmp_path / "squeue"
    squeue.write_text(f'#!/bin/sh\nread -r line < {file} || {{ echo "timed out" >&2; exit 1; }}\ncat {file}\n')
    squeue.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return file


@pytest.mark.parametrize(
    ("text", "chain"),
    [
        ("7|(null)\n8|other", (7,)),
        ("9|stepkeeper:after=7.0\n7|(null)", (7, 9)),
        ("12|me stepkeeper:after=9.2\n9|me stepkeeper:after=7.0\n8|stepkeeper:after=6.0\n7|me", (7, 9, 12)),
        ("9|stepkeeper:after=77.0\n10|stepkeeper:after=8.0\n7|", (7,)),
        ("7|stepkeeper:after=9.0\n9|stepkeeper:after=7.0", (7, 9)),  # nobody wrote that, and it ends
        ("", (7,)),
    ],
)
def test_a_job_and_those_in_its_place(text: str, chain: tuple[int, ...]) -> None:
    assert selftest.chain(text, 7) == chain


@pytest.mark.parametrize(
    ("text", "states", "over"),
    [
        ("7|x", {7: RUNNING}, (False, 7)),
        ("7|x", {7: ENDED}, (True, 7)),
        ("8|x", {}, (True, 7)),  # Slurm has forgotten it
        ("9|stepkeeper:after=7.0\n7|x", {7: ENDED, 9: PENDING}, (False, 9)),
        ("9|stepkeeper:after=7.0", {9: RUNNING}, (False, 9)),
        ("9|stepkeeper:after=7.0\n7|x", {7: ENDED, 9: ENDED}, (True, 9)),
    ],
)
def test_a_run_is_over_when_the_last_of_its_jobs_is(
    listing: Path, text: str, states: dict[int, JobState], over: tuple[bool, int]
) -> None:
    listing.write_text(text + "\n")

    assert selftest.over(Answering(states), 7) == over


def test_a_slurm_that_does_not_answer_says_nothing_of_an_end(listing: Path) -> None:
    assert listing.read_text() == "", "squeue says that nobody answers"
    assert selftest.over(Answering({}, away=True), 7) == (False, 7)
    assert selftest.over(Answering({7: ENDED}), 7) == (False, 7)


def test_no_job_is_left_behind(listing: Path) -> None:
    listing.write_text("12|stepkeeper:after=9.0\n9|stepkeeper:after=7.0\n7|x\n8|x\n")
    slurm = Answering({7: ENDED, 9: JobState.COMPLETING, 12: PENDING, 8: RUNNING})

    selftest.stop(slurm, 7)

    assert slurm.cancelled == ["12", "9"], "the one that waits first: nobody follows it"
    with pytest.raises(SlurmError, match="away"):
        selftest.stop(Answering({}, away=True), 7)
