"""Planted files: pipes do not hold us up, links lead nowhere, asks of others are not heard."""

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from stepkeeper.errors import StepkeeperError
from stepkeeper.store import asks, journal, tenure
from stepkeeper_trainer.formats import lease, lineage, outcome
from stepkeeper_trainer.formats.lease import Lease

OURS = Lease(job_id=1, restart_count=0, attempt=0, node="n1", pid=1, taken_at=0.0)
READERS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "lease": (lease.LEASE_NAME, lease.read),
    "outcome": (outcome.OUTCOME_NAME, outcome.read),
    "lineage": (lineage.LINEAGE_NAME, lineage.read),
    "journal": ("journal.jsonl", lambda run: list(journal.read(run / "journal.jsonl"))),
}


@pytest.mark.parametrize("what", READERS)
@pytest.mark.timeout(120)
def test_a_pipe_in_the_place_of_a_file_holds_nobody_up(tmp_path: Path, what: str) -> None:
    name, read = READERS[what]
    os.mkfifo(tmp_path / name)

    with pytest.raises(OSError, match="not a plain file"):
        read(tmp_path)


@pytest.mark.parametrize("what", READERS)
def test_a_link_in_the_place_of_a_file_is_not_followed(tmp_path: Path, what: str) -> None:
    name, read = READERS[what]
    (tmp_path / "other").write_text("{}")
    (tmp_path / name).symlink_to(tmp_path / "other")

    with pytest.raises(OSError, match="symbolic links"):
        read(tmp_path)


def test_a_planted_pipe_is_named_at_the_start(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / lease.LEASE_NAME)

    with pytest.raises(StepkeeperError, match="not a plain file"):
        tenure.take(tmp_path, OURS, job_runs=lambda _: False)


def test_the_lease_replaces_a_link_and_leaves_its_target(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("precious")
    (tmp_path / lease.LEASE_NAME).symlink_to(tmp_path / "victim")

    lease.write(tmp_path, OURS)

    assert (tmp_path / "victim").read_text() == "precious"
    assert lease.read(tmp_path) == OURS


def test_lines_are_not_appended_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("precious\n")
    (tmp_path / lineage.LINEAGE_NAME).symlink_to(tmp_path / "victim")

    with pytest.raises(OSError, match="symbolic links"):
        lineage.append(tmp_path, lineage.Rollback(at=1.0, save_id=None, why="x"))

    assert (tmp_path / "victim").read_text() == "precious\n"


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file away")
def test_an_ask_of_somebody_else_is_not_heard(tmp_path: Path) -> None:
    ask = asks.Ask(kind="stop", job_id=7, at=time.time())
    ours = asks.write(tmp_path, ask)
    theirs = asks.write(tmp_path, ask)
    os.chown(tmp_path / asks.DIRECTORY / theirs, 12345, 12345)
    os.mkfifo(tmp_path / asks.DIRECTORY / "stop-pipe")
    (tmp_path / asks.DIRECTORY / "stop-link").symlink_to(tmp_path / asks.DIRECTORY / ours)

    assert list(asks.waiting(tmp_path, 7)) == [ours]
