"""Groups of all ranks: who is connected with whom, and that all collectives and saves work by way of a tree."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from stepkeeper_trainer.coordinate.groups import FAN_OUT, blocks
from stepkeeper_trainer.formats.steps import list_steps
from stepkeeper_trainer.formats.verify import verify
from tests.trainer import group_scenes
from tests.trainer.scenes import Stage

SCENES = "tests.trainer.group_scenes"
LIMIT_S = 200.0


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    with Stage() as found:
        yield found


@pytest.mark.parametrize("fan_out", [2, 3, 8, 32])
def test_each_rank_is_in_the_groups_of_its_blocks_and_reaches_rank_0(fan_out: int) -> None:
    for size in (*range(1, 40), 64, 1000):
        of_rank = {rank: list(blocks(rank, size, fan_out)) for rank in range(size)}
        for rank, own in of_rank.items():
            assert all(rank in block and 1 < len(block) <= fan_out for block in own)
            assert all(block in of_rank[member] for block in own for member in block), "all members make it"
            above = [block[0] for block in own if block[0] != rank]
            assert len(above) == (1 if rank else 0), "one rank stands for it"
            assert all(first < rank for first in above)


def test_few_ranks_are_one_group() -> None:
    assert [list(blocks(rank, FAN_OUT, FAN_OUT)) for rank in (0, 5)] == [[range(FAN_OUT)]] * 2


@pytest.mark.parametrize("size", [10_000, 100_000])
def test_a_rank_has_few_connections_however_many_ranks_there_are(size: int) -> None:
    most = max(sum(len(block) - 1 for block in blocks(rank, size, FAN_OUT)) for rank in range(0, size, FAN_OUT))
    assert most <= 4 * (FAN_OUT - 1)


@pytest.mark.parametrize("size", [2, 3, 5, 6])
def test_each_collective_gives_what_it_promises(stage: Stage, tmp_path: Path, size: int) -> None:
    ended = stage.play(f"{SCENES}:talks", tmp_path, ranks=size, limit_s=LIMIT_S, size=size)

    assert ended.codes == [0] * size, ended.said


def test_groups_of_processes_with_another_past_find_each_other(stage: Stage, tmp_path: Path) -> None:
    ended = stage.play(f"{SCENES}:begins_again", tmp_path, ranks=3, limit_s=LIMIT_S, size=3)

    assert ended.codes == [0] * 3, ended.said


def test_collectives_wait_for_a_message_that_is_on_its_way(stage: Stage, tmp_path: Path) -> None:
    ended = stage.play(f"{SCENES}:is_late", tmp_path, ranks=3, limit_s=LIMIT_S)

    assert ended.codes == [0] * 3, ended.said


def test_a_group_whose_last_message_is_not_answered_is_left_open(stage: Stage, tmp_path: Path) -> None:
    ended = stage.play(f"{SCENES}:closes", tmp_path, ranks=2, limit_s=30.0)

    assert ended.codes == [0] * 2, ended.said


def test_a_training_of_several_levels_resumes_where_it_was(stage: Stage, tmp_path: Path) -> None:
    said = [
        stage.play(f"{SCENES}:trains", tmp_path / name, ranks=5, limit_s=LIMIT_S, steps=steps).said
        for name, steps in (("whole", 6), ("halves", 4), ("halves", 6))
    ]

    whole, *halves = (dict(re.findall(r"^(rank \d+: step \d+): (.+)$", each, re.MULTILINE)) for each in said)
    assert len(whole) == 5 * 6, said[0]
    assert halves[0] | halves[1] == whole
    assert set(halves[1]) == {f"rank {rank}: step {step}" for rank in range(5) for step in (5, 6)}


@pytest.mark.parametrize("who", [1, 3, pytest.param(2, marks=pytest.mark.campaign)])
def test_a_rank_that_dies_before_its_report_is_told_of_by_the_ranks_between(
    stage: Stage, tmp_path: Path, who: int
) -> None:
    """Rank 3 is connected with rank 2 alone, which stands for both."""
    ended = stage.play(f"{SCENES}:ends", tmp_path / "run", ranks=4, limit_s=LIMIT_S, hit="report.publish", who=who)

    assert ended.codes[who] == -9, ended.said
    assert ended.codes[0] == 1, ended.said
    assert f"the last step (2) could not be saved: rank {who} ended before it had written its part" in ended.said
    assert not list_steps(tmp_path / "run/checkpoints")


def test_a_rank_that_dies_after_its_report_costs_no_step(stage: Stage, tmp_path: Path) -> None:
    ended = stage.play(f"{SCENES}:ends", tmp_path / "run", ranks=4, limit_s=LIMIT_S, hit="reported", who=3)

    assert ended.codes[0] == 0, ended.said
    [step] = list_steps(tmp_path / "run/checkpoints")
    assert (step.step, verify(step.path).ok) == (2, True)


@pytest.mark.campaign
def test_a_script_that_ends_while_another_rank_is_late_leaves_at_once_and_clean(stage: Stage, tmp_path: Path) -> None:
    ended = stage.play(f"{SCENES}:leaves", tmp_path, ranks=3, limit_s=13.0)

    assert ended.codes[:2] == [0, 0], "not killed at the scene's limit, and not aborted by torch\n" + ended.said


def test_the_scenes_have_several_levels() -> None:
    assert [list(block) for block in blocks(0, 5, group_scenes.FAN_OUT)] == [[0, 1], [0, 2], [0, 4]]
