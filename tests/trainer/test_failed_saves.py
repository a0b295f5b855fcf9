"""Saves of two ranks that come to nothing leave nothing on any disk, and those that nearly do are whole."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from stepkeeper_trainer.formats.steps import list_steps
from stepkeeper_trainer.formats.verify import verify
from tests.trainer.scenes import Stage

SCENES = "tests.trainer.failing_scenes"
LIMIT_S = 240.0


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    with Stage() as found:
        yield found


def steps(directory: Path) -> list[int]:
    """Return the steps of a run; each is whole."""
    found = list_steps(directory / "run/checkpoints")
    assert all(verify(step.path).ok for step in found)
    return sorted(step.step for step in found)


@pytest.mark.parametrize("disks", ["", "one", "two"])
def test_a_save_that_comes_to_nothing_leaves_nothing_on_any_disk(stage: Stage, tmp_path: Path, disks: str) -> None:
    """Cancelled, refused by the disk of either rank, never copied: of what a node has, much would soon be full."""
    ended = stage.play(f"{SCENES}:comes_to_nothing", tmp_path, ranks=2, limit_s=LIMIT_S, disks=disks)

    assert ended.codes == [0, 0], ended.said
    assert steps(tmp_path) == [10 if disks else 9], ended.said


@pytest.mark.parametrize("disks", ["", "two"])
def test_an_urgent_save_takes_over_on_both_ranks_though_one_has_reported(
    stage: Stage, tmp_path: Path, disks: str
) -> None:
    ended = stage.play(f"{SCENES}:takes_over", tmp_path, ranks=2, limit_s=LIMIT_S, disks=disks)

    assert ended.codes == [75, 75], ended.said
    assert "rank 0: True cancelled: no time for it" in ended.said
    last = int(re.findall(r"^\[0\] stopped step=(\d+)", ended.said, re.MULTILINE)[0])
    assert steps(tmp_path) == [1, last], ended.said
    assert list(tmp_path.rglob(".tmp-step_*")) == []


def test_a_save_that_is_cancelled_too_late_is_committed_on_both_ranks(stage: Stage, tmp_path: Path) -> None:
    ended = stage.play(f"{SCENES}:commits_as_it_is_cancelled", tmp_path, ranks=2, limit_s=LIMIT_S)

    assert ended.codes == [0, 0], ended.said
    assert sorted(re.findall(r"^rank (\d): (.*)", ended.said, re.MULTILINE)) == [
        ("0", "None"), ("0", "None"), ("1", "None"), ("1", "None")
    ]  # fmt: skip
    assert steps(tmp_path) == [1, 2]


@pytest.mark.parametrize("disks", ["one", "two"])
def test_a_nodes_disk_that_fills_up_in_the_middle_of_a_save_costs_nothing(
    stage: Stage, tmp_path: Path, disks: str
) -> None:
    ended = stage.play(f"{SCENES}:disk_fills_up", tmp_path, ranks=2, limit_s=LIMIT_S, disks=disks)

    assert ended.codes == [0, 0], ended.said
    assert steps(tmp_path) == [1, 2, 3], ended.said
    assert re.search(r"local_tier_failed step=2 rank=1 .*No space left", ended.said), ended.said
