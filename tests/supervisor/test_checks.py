"""A look at the node that is begun ahead serves the launch that follows, and nothing else."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from stepkeeper.watcher import checks as looking
from stepkeeper.watcher import messages as bus
from stepkeeper.watcher.checks import NodeChecks
from tests.supervisor.assignments import assigned

LONG_S = 600.0


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes start slowly on a busy machine."""
    monkeypatch.setattr(looking, "CHECKS_WITHIN_S", 90.0)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    path = tmp_path / "run"
    path.mkdir()
    return path


def made(directory: Path, *, fresh_s: float = LONG_S, free_bytes_min: int = 0) -> NodeChecks:
    return NodeChecks(assigned(directory, free_bytes_min=free_bytes_min), fresh_s=fresh_s)


def ask(checking: NodeChecks, *, behind_s: float = 0.0) -> tuple[str, ...]:
    now = time.time()
    wanted = bus.Clear(launch=1, at=now + behind_s)
    return checking.report(wanted, now).problems


def look_ahead_of_a_loss(checking: NodeChecks, directory: Path) -> None:
    """Look while all is well, and lose the directory after that."""
    checking.begin()
    checking.wait()
    directory.rmdir()


def test_a_look_begun_ahead_is_used_once(directory: Path) -> None:
    checking = made(directory)
    assert ask(checking) == ()
    look_ahead_of_a_loss(checking, directory)

    assert ask(checking) == (), "found before the directory was lost"
    assert len(ask(checking)) == 1, "the second question has a look of its own"


def test_an_old_look_is_not_used(directory: Path) -> None:
    checking = made(directory, fresh_s=0.0)
    assert ask(checking) == ()
    look_ahead_of_a_loss(checking, directory)
    assert len(ask(checking)) == 1


def test_a_look_before_the_first_launch_serves_it(directory: Path) -> None:
    checking = made(directory)
    look_ahead_of_a_loss(checking, directory)
    assert ask(checking) == ()


def test_what_a_launch_wants_of_the_storage_is_looked_at(directory: Path) -> None:
    (problem,) = ask(made(directory, free_bytes_min=2**62))
    assert "free" in problem


def test_the_clock_is_compared_at_the_question_whenever_the_rest_was_looked_at(directory: Path) -> None:
    checking = made(directory)
    assert ask(checking) == ()
    checking.begin()
    (problem,) = ask(checking, behind_s=LONG_S)
    assert problem.startswith("clock: ")


def test_a_node_that_takes_no_part_leaves_the_look_to_the_launch(directory: Path) -> None:
    checking = made(directory)
    assert ask(checking) == ()
    look_ahead_of_a_loss(checking, directory)
    now = time.time()
    assert len(checking.report(bus.Check(node="a", number=1, at=now), now).problems) == 1
    assert ask(checking) == ()
