"""What some ranks have saved is loaded by any other number, by ours and by stock DCP, bit for bit."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from stepkeeper_trainer.formats.verify import verify
from tests.trainer.scenes import Stage

SCENES = "tests.trainer.worlds"


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    with Stage() as found:
        yield found


@pytest.mark.parametrize("how", ["load", "stock_load"])
@pytest.mark.parametrize(
    ("saved", "loaded"),
    [(2, 1), (2, 4), *(pytest.param(*counts, marks=pytest.mark.campaign) for counts in ((1, 2), (2, 2), (4, 3)))],
)
def test_a_step_of_some_ranks_is_loaded_by_others(
    stage: Stage, saved_by: dict[int, Path], saved: int, loaded: int, how: str
) -> None:
    ended = stage.play(f"{SCENES}:{how}", saved_by[saved], ranks=loaded)

    assert ended.codes == [0] * loaded, ended.said
    assert ended.said.count("wrong: []") == loaded


def test_a_rank_that_reads_for_longer_than_a_save_may_take_fails_no_resume(
    stage: Stage, saved_by: dict[int, Path], tmp_path: Path
) -> None:
    shutil.copytree(saved_by[2], tmp_path / "run")

    ended = stage.play("tests.trainer.resume_scenes:slow_rank", tmp_path / "run", ranks=2)

    assert ended.codes == [0, 0], ended.said
    assert ended.said.count("wrong: []") == 2


def test_the_ranks_of_a_node_share_the_memory_for_loading(
    stage: Stage, saved_by: dict[int, Path], tmp_path: Path
) -> None:
    shutil.copytree(saved_by[2], tmp_path / "run")

    ended = stage.play("tests.trainer.resume_scenes:limited", tmp_path / "run", ranks=2, gib=0.5)

    assert ended.codes == [0, 0], ended.said
    for rank in range(2):
        assert f"rank {rank} may take {256 * 1024**2}\n" in ended.said


class _Saved(dict[int, Path]):
    """Saves are made when they are first asked for."""

    def __init__(self, stage: Stage, parent: Path) -> None:
        super().__init__()
        self._stage, self._parent = stage, parent

    def __missing__(self, count: int) -> Path:
        run_dir = self._parent / f"{count}-ranks"
        ended = self._stage.play(f"{SCENES}:save", run_dir, ranks=count)
        assert ended.codes == [0] * count, ended.said
        assert verify(run_dir / "checkpoints/step_00000001").ok
        self[count] = run_dir
        return run_dir


@pytest.fixture(scope="module")
def saved_by(stage: Stage, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    return _Saved(stage, tmp_path_factory.mktemp("worlds"))
