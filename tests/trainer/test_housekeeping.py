"""What rank 0 does with older steps beside training, where they come faster than it reads them."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from stepkeeper_trainer.environment import read_environment
from stepkeeper_trainer.formats import verify as verifying
from stepkeeper_trainer.formats.reading import Reading
from stepkeeper_trainer.formats.verify import join_shards, verify_shard
from stepkeeper_trainer.save.commit import Commits, CommittedStep
from stepkeeper_trainer.store import retention
from stepkeeper_trainer.store.retention import BEHIND_STEPS, Policy, Retention, prune
from tests.trainer.test_formats import make_step

LIMIT_S = 60.0


def step(number: int, checkpoints: Path) -> CommittedStep:
    """Return what retention hears of a commit."""
    return CommittedStep(
        step=number, save_id=f"{number}", checkpoints=checkpoints, emergency=False, epoch_end=False,
        requested_at=0.0, blocked_s=0.0,
    )  # fmt: skip


def test_steps_that_come_faster_than_they_are_read_are_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(retention, "SETTLED_S", 0.0)
    reads, may_go_on = threading.Semaphore(0), threading.Semaphore(0)

    def slow(*_arguments: object, **_options: object) -> retention.Outcome:
        reads.release()
        assert may_go_on.acquire(timeout=LIMIT_S)
        return retention.Outcome(retention.Plan({}, ()), ())

    monkeypatch.setattr(retention, "prune", slow)
    commits = Commits(tmp_path, read_environment({}))
    for number in (1, 2, 3):
        make_step(commits.checkpoints, number)
    housekeeping = Retention(commits, Policy(keep_last=1))
    housekeeping.committed(step(3, commits.checkpoints))
    for _ in range(2):
        assert reads.acquire(timeout=LIMIT_S)
        for _ in range(BEHIND_STEPS - 1):
            housekeeping.committed(step(4, commits.checkpoints))
        may_go_on.release()
    assert "retention_behind" not in caplog.text, "each look has taken a little longer than a save"
    assert reads.acquire(timeout=LIMIT_S)
    for _ in range(3 * BEHIND_STEPS):
        housekeeping.committed(step(5, commits.checkpoints))

    may_go_on.release(10)
    housekeeping.close(float("inf"))
    assert caplog.text.count("retention_behind steps=3 ") == 1


def test_what_the_watchers_have_found_right_is_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verifying, "SETTLED_S", -LIMIT_S)
    for number in (1, 2, 3):
        directory = make_step(tmp_path, number)
        if number != 2:
            shares = [verify_shard(directory, share, 2) for share in range(2)]
            assert join_shards(directory, shares, cache=verifying.Cache(tmp_path, knows=False)).ok
    sizes: list[int] = []

    outcome = prune(tmp_path, Policy(keep_last=1), reading=Reading(threads=1, on_read=sizes.append))

    assert outcome.removed == ("step_00000001", "step_00000002")
    second = next(path for path in tmp_path.iterdir() if path.name.startswith(f"{retention.TRASH}step_00000002"))
    assert sum(sizes) == sum(f.stat().st_size for f in second.iterdir() if f.name != "MANIFEST.json")
    assert os.path.isdir(tmp_path / "step_00000003")
