"""What each rank has of its own, on another number of ranks: `reshard`, and positions that only as many can take."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.trainer.any_state import Play, Played, play

STEPS, STOP = 8, 6


def resumed(scene: str, run_dir: Path, *, ranks: int, then: int) -> Played:
    """Play on some ranks, then go on with others."""
    first, second = play(
        [
            Play(scene=scene, run_dir=str(run_dir), steps=STOP, world_size=then),
            Play(scene=scene, run_dir=str(run_dir), steps=STEPS, world_size=ranks, resume=True),
        ]
    )
    assert set(first.codes) == {0}, first.said
    return second


@pytest.mark.parametrize(("then", "ranks"), [(2, 3), pytest.param(3, 2, marks=pytest.mark.campaign)])
def test_an_object_makes_the_state_of_each_rank_from_those_of_others(tmp_path: Path, then: int, ranks: int) -> None:
    """Values of each rank, and one that all hold alike, which is kept once."""
    second = resumed("reader_that_reshards", tmp_path, then=then, ranks=ranks)

    assert set(second.codes) == {0}, second.said
    read = {shard: 0 for shard in range(12)}
    for rank in range(then):
        own = list(range(rank, 12, then))
        for at in range(STOP):
            read[own[at % len(own)]] += 1 + own[at % len(own)]
    for rank in range(ranks):
        mine = {shard: read[shard] for shard in range(rank, 12, ranks)}
        assert f"[{rank}] reader has {mine} {[float(STOP)] * 3}" in second.said, second.said


def test_as_many_ranks_get_their_own_state_back_without_reshard(tmp_path: Path) -> None:
    second = resumed("reader_that_reshards_badly", tmp_path, then=2, ranks=2)

    assert set(second.codes) == {0}, second.said


def test_an_error_of_one_ranks_reshard_ends_all_ranks_with_its_name(tmp_path: Path) -> None:
    second = resumed("reader_that_reshards_badly", tmp_path, then=2, ranks=3)

    assert second.codes == [66, 66, 66], second.said
    for rank in range(3):
        assert re.search(
            rf"\[{rank}\] .*ResumeError: reader: _ShardsOfOne.reshard of rank 2 raised RuntimeError: no shard is left",
            second.said,
        ), second.said


def test_a_count_of_what_yields_data_is_refused_on_other_ranks_though_all_are_equal(tmp_path: Path) -> None:
    second = resumed("reader_that_counts", tmp_path, then=2, ranks=3)

    assert set(second.codes) == {66}, second.said
    assert "3 ranks cannot go on where 2 were: reader counts what each rank has read; resume on 2 ranks" in second.said


def test_a_position_of_the_whole_job_says_so_and_goes_on_with_any_number_of_ranks(tmp_path: Path) -> None:
    second = resumed("reader_that_counts_for_all", tmp_path, then=2, ranks=3)

    assert set(second.codes) == {0}, second.said
