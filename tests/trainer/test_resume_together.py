"""All ranks resume together, however much slower one of them reads, in the memory that their node has for it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.trainer.scenes import Stage


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    with Stage() as found:
        yield found


@pytest.fixture(scope="module")
def run_dir(stage: Stage, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two ranks with one step."""
    path = tmp_path_factory.mktemp("resumed") / "run"
    ended = stage.play("tests.trainer.worlds:save", path, ranks=2)
    assert ended.codes == [0, 0], ended.said
    return path


def test_a_rank_that_reads_for_longer_than_a_save_may_take_fails_no_resume(stage: Stage, run_dir: Path) -> None:
    ended = stage.play("tests.trainer.resume_scenes:slow_rank", run_dir, ranks=2, limit_s=80.0)

    assert ended.codes == [0, 0], ended.said
    assert ended.said.count("wrong: []") == 2


def test_the_ranks_of_a_node_share_the_memory_for_loading(stage: Stage, run_dir: Path) -> None:
    ended = stage.play("tests.trainer.resume_scenes:limited", run_dir, ranks=2, gib=0.5)

    assert ended.codes == [0, 0], ended.said
    for rank in range(2):
        assert f"rank {rank} may take {256 * 1024**2}\n" in ended.said
