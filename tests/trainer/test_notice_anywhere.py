"""A notice that comes far from the end of a step is answered: the state of the last step is saved as it was."""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from stepkeeper_trainer.formats.steps import list_steps
from stepkeeper_trainer.formats.verify import verify
from tests.trainer.fsdp import needs_fsdp
from tests.trainer.scenes import Ended, Stage

SCENE = "tests.trainer.notice_scenes:interrupted"
LEFT = 9  # without having come to the end of a step


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    with Stage() as found:
        yield found


def fingerprints(said: str, word: str = "done") -> dict[tuple[str, str], str]:
    return {(rank, step): own for rank, step, own in re.findall(rf"\[(\d)\] {word} (\d+) (\w+)", said)}


def check_resume(stage: Stage, run: Path, ended: Ended, *, ranks: int) -> None:
    """The newest step is whole, and each rank gets back what it had then."""
    newest = list_steps(run / "checkpoints")[-1]
    assert verify(newest.path).ok
    resumed = stage.play(SCENE, run, ranks=ranks, where="", resume=True)
    assert resumed.codes == [0] * ranks, resumed.said
    then, now = fingerprints(ended.said), fingerprints(resumed.said, "resumed")
    assert len(now) == ranks
    for (rank, step), own in now.items():
        assert int(step) == newest.step
        assert own == then[rank, step], f"rank {rank} has another state than after step {step}"


@needs_fsdp
@pytest.mark.parametrize("where", ["evaluation", "loader", "compilation", "averaged"])
def test_the_last_step_is_saved_while_the_main_threads_are_elsewhere(stage: Stage, tmp_path: Path, where: str) -> None:
    ended = stage.play(SCENE, tmp_path / "run", ranks=2, where=where)

    assert "save_between_steps step=3" in ended.said, ended.said
    assert LEFT in ended.codes, ended.said
    assert "while swapped: True" not in ended.said
    check_resume(stage, tmp_path / "run", ended, ranks=2)


@needs_fsdp
def test_a_state_that_the_next_step_has_begun_to_change_waits_for_its_end(stage: Stage, tmp_path: Path) -> None:
    ended = stage.play(SCENE, tmp_path / "run", ranks=2, where="normalised")

    assert ended.codes == [75, 75], ended.said
    assert "saved while changed: False" in ended.said
    assert "notice_waits step=3" in ended.said
    check_resume(stage, tmp_path / "run", ended, ranks=2)


@needs_fsdp
def test_a_snapshot_that_was_resumed_from_is_saved_before_a_first_step_has_ended(stage: Stage, tmp_path: Path) -> None:
    """The nodes alone have it, in memory, and that ends with the job."""
    memory = tempfile.mkdtemp(dir="/dev/shm")
    try:
        scene = "tests.trainer.notice_scenes:from_memory"
        begun = stage.play(scene, tmp_path / "run", ranks=2, memory=memory, resume=False)
        assert not list_steps(tmp_path / "run/checkpoints"), begun.said
        ended = stage.play(scene, tmp_path / "run", ranks=2, memory=memory, resume=True)
    finally:
        shutil.rmtree(memory)
    [step] = {int(each) for each in re.findall(r"in memory (\d+)", ended.said)}
    assert step > 0, ended.said
    assert f"save_between_steps step={step}" in ended.said, ended.said
    check_resume(stage, tmp_path / "run", begun, ranks=2)


def test_where_no_step_is_done_there_is_nothing_to_save(stage: Stage, tmp_path: Path) -> None:
    ended = stage.play(SCENE, tmp_path / "run", ranks=2, where="warm-up")

    assert ended.codes == [LEFT, LEFT], ended.said
    assert "nothing_to_save step=0" in ended.said
    assert not list_steps(tmp_path / "run/checkpoints")


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=needs_fsdp)])
def test_threads_that_try_while_steps_end_leave_one_whole_answer(stage: Stage, tmp_path: Path, ranks: int) -> None:
    ended = stage.play(SCENE, tmp_path / "run", ranks=ranks, where="racing")

    assert ended.codes == [75] * ranks, ended.said
    check_resume(stage, tmp_path / "run", ended, ranks=ranks)
