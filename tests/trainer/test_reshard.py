"""What each rank has of its own, on another number of ranks: `reshard`, and positions that only as many can take."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest

from stepkeeper_trainer.errors import UsageError
from stepkeeper_trainer.sampler import GlobalSampler, data_rank
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
    read = dict.fromkeys(range(12), 0)
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
            rf"\[{rank}\] .*ResumeError: rank 2: reader: _ShardsOfOne.reshard raised RuntimeError: no shard is left",
            second.said,
        ), second.said


def test_a_count_of_what_yields_data_is_refused_on_other_ranks_though_all_are_equal(tmp_path: Path) -> None:
    second = resumed("reader_that_counts", tmp_path, then=2, ranks=3)

    assert set(second.codes) == {66}, second.said
    assert "3 ranks cannot resume what 2 saved: reader counts what each rank has read; resume on 2 ranks" in second.said


def test_a_position_of_the_whole_job_says_so_and_goes_on_with_any_number_of_ranks(tmp_path: Path) -> None:
    second = resumed("reader_that_counts_for_all", tmp_path, then=2, ranks=3)

    assert set(second.codes) == {0}, second.said


@pytest.mark.parametrize(("then", "ranks"), [(4, 2), pytest.param(2, 4, marks=pytest.mark.campaign)])
def test_as_many_data_parallel_ranks_go_on_with_another_tensor_parallelism(
    tmp_path: Path, then: int, ranks: int
) -> None:
    second = resumed("two_data_ranks", tmp_path, then=then, ranks=ranks)

    assert set(second.codes) == {0}, second.said
    for rank in range(ranks):
        own = rank // (ranks // 2)
        assert f"[{rank}] data rank {own} goes on at {STOP * (1 + own)}\n" in second.said + "\n", second.said


def test_other_data_parallel_ranks_are_refused(tmp_path: Path) -> None:
    [first] = play([Play(scene="two_data_ranks", run_dir=str(tmp_path), steps=STOP, world_size=2)])
    [second] = play([Play(scene="one_data_rank", run_dir=str(tmp_path), steps=STEPS, world_size=1, resume=True)])

    assert first.codes == [0, 0], first.said
    assert second.codes == [66], second.said
    assert "1 of them (rank 0 of 1) cannot resume what 2 saved; resume with 2, or use a GlobalSampler" in second.said


class Mesh:
    """What the sampler asks a DeviceMesh."""

    def __init__(self, coordinate: list[int] | None, shape: tuple[int, ...]) -> None:
        self._coordinate, self.shape = coordinate, shape

    def get_coordinate(self) -> list[int] | None:
        return self._coordinate

    def size(self) -> int:
        return math.prod(self.shape)


def test_a_mesh_of_several_dimensions_counts_its_ranks_in_a_row() -> None:
    places = [data_rank(Mesh([a, b], (2, 3))) for a in range(2) for b in range(3)]  # type: ignore[arg-type]

    assert places == [(rank, 6) for rank in range(6)]
    with pytest.raises(UsageError, match="not in"):
        data_rank(Mesh(None, (2,)))  # type: ignore[arg-type]


def test_the_mesh_says_what_each_rank_reads() -> None:
    def read(**given: Any) -> list[int]:
        return next(iter(GlobalSampler(40, seed=1).batches(batch=8, micro_batch=4, **given)))

    assert read(mesh=Mesh([1], (2,))) == read(rank=1, world_size=2) != read(rank=0, world_size=2)
    for wrong in ({}, {"rank": 1}, {"rank": 0, "world_size": 2, "mesh": Mesh([1], (2,))}):
        with pytest.raises(UsageError, match="give rank= and world_size=, or mesh="):
            read(**wrong)
