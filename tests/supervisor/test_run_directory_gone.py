"""A run directory that somebody removes while its supervisor runs."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest

from stepkeeper.core import events as on
from stepkeeper.loop_tools import Clock
from stepkeeper.supervisor.sources import run_directory as source
from stepkeeper.supervisor.sources.process import Inbox
from stepkeeper_trainer.formats import lease
from stepkeeper_trainer.formats.lease import LEASE_NAME, Lease, write

WITHIN_S = 60.0
OURS = Lease(job_id=7, restart_count=0, attempt=0, node="n1", pid=1, taken_at=0.0)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(source, "LOOK_EVERY_S", 0.05)
    monkeypatch.setattr(source, "GONE_AFTER_S", 0.5)
    directory = tmp_path / "run"
    directory.mkdir()
    write(directory, OURS)
    return directory


def watched(run: Path) -> Inbox[on.Event]:
    inbox: Inbox[on.Event] = Inbox(Clock())
    source.watch_lease(run, OURS, inbox=inbox, on_error=lambda _: None)
    return inbox


def test_a_run_directory_that_is_removed_is_gone(run: Path) -> None:
    inbox = watched(run)
    while run.exists():  # the lease may be put back into it meanwhile
        shutil.rmtree(run, ignore_errors=True)

    event = inbox.get(WITHIN_S)

    assert isinstance(event, on.RunDirectoryGone)
    assert event.path == str(run)


def test_one_that_a_save_makes_anew_is_not_the_run_directory(run: Path) -> None:
    """Ranks create what they write to; the lease is not put into it again."""
    inbox = watched(run)
    aside = run.with_name("aside")  # it keeps its number, which the new one could get else
    run.rename(aside)
    (run / "checkpoints").mkdir(parents=True)

    assert isinstance(inbox.get(WITHIN_S), on.RunDirectoryGone)
    assert not (run / LEASE_NAME).exists()


def test_one_that_is_replaced_while_its_lease_is_read_gets_no_lease(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the look at the directory and the write into it, another one takes its place."""
    read = lease.read

    def replacing(directory: Path) -> Lease | None:
        if not run.with_name("aside").exists():
            run.rename(run.with_name("aside"))
            (run / "checkpoints").mkdir(parents=True)
        return read(directory)

    monkeypatch.setattr(lease, "read", replacing)
    inbox = watched(run)

    assert isinstance(inbox.get(WITHIN_S), on.RunDirectoryGone)
    assert not (run / LEASE_NAME).exists()


def test_one_that_comes_back_is_there(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mount that is away for a moment, or a directory that was copied and put in the place of the old one."""
    monkeypatch.setattr(source, "GONE_AFTER_S", 30.0)
    inbox = watched(run)
    aside = run.with_name("aside")
    run.rename(aside)
    time.sleep(0.3)
    shutil.copytree(aside, run)
    write(run, Lease(job_id=8, restart_count=0, attempt=1, node="n1", pid=1, taken_at=0.0))

    assert isinstance(inbox.get(WITHIN_S), on.Superseded)
