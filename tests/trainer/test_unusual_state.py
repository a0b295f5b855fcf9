"""Modules, optimizers and values that keep their state in unusual ways: resumed to the last bit, or refused by name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.trainer.any_state import Play, play
from tests.trainer.fsdp import needs_fsdp
from tests.trainer.test_any_state import STEPS, STOP
from tests.trainer.unusual_scenes import EXACT, NOT_RESUMED, RANKS, REFUSED, VALUES

FSDP = {"an_average_that_begins_late"}
IN_EACH_RUN = {
    "optimizers_of_all_kinds",
    "a_module_that_training_changes",
    "values_of_all_kinds",
    "parts_of_some_ranks",
}
"""Other scenes are played by the campaign."""
REASONS = {
    "moments_on_a_mesh_of_no_parameter": r"optimizer\.state\.\S+ is sharded over the ranks .0, 1., and no parameter",
    "a_quantized_buffer": r"model\.codes is a Tensor, .* of torch\.qint8",
    "a_sparse_buffer": r"model\.sparse is a Tensor, torch\.sparse_csr",
    "a_buffer_without_memory": r"model\.meta is a Tensor, .* on meta",
    "an_expanded_buffer": r"model\.expanded is expanded, .*: clone\(\) it",
    "a_parameter_without_a_shape": r"model\.lazy\.weight has no shape .*: call the module once before resume",
    "a_value_that_is_a_part_of_a_sum": r"box\.value is a DTensor with the placement Partial",
    "a_momentum_that_is_sparse": r"optimizer\.state\.weight\.momentum_buffer is a Tensor, torch\.sparse_coo",
    "a_schedule_that_holds_a_function": r"schedule\.lr_lambdas\.0\.curve is a function",
    **VALUES,
}
AT_RESUME = {
    "a_group_of_no_module_that_training_adds": r"optimizer has 1 parameter groups, the checkpoint 2",
    "a_group_that_training_removes": r"optimizer has 2 parameter groups, the checkpoint 1",
    "a_buffer_that_nobody_has_declared": r"has \['model\.late'\] besides",
}


def test_a_buffer_that_grows_on_each_rank_is_saved_while_training_waits(tmp_path: Path) -> None:
    """Three saves find values under new names that differ; from then on each save holds training until it counts."""
    [ended] = play(
        [Play(scene="a_buffer_to_which_each_rank_appends", run_dir=str(tmp_path / "run"), steps=40, every=4)]
    )

    assert ended.codes == [0, 0], ended.said
    assert "save_holds_training" in ended.said
    committed = [int(step) for step in re.findall(r" committed step=(\d+)", ended.said)]
    assert len(committed) >= 4, ended.said
    assert committed[0] < 30, ended.said


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[needs_fsdp] * (name in FSDP) + [pytest.mark.campaign] * (name not in IN_EACH_RUN))
        for name in sorted(EXACT)
    ],
)
def test_a_resume_goes_on_to_the_last_bit(tmp_path: Path, name: str) -> None:
    ranks = RANKS.get(name, 2)

    whole, first, second = play(
        [
            Play(scene=name, run_dir=str(tmp_path / "whole"), steps=STEPS, world_size=ranks, every=100),
            Play(scene=name, run_dir=str(tmp_path / "parts"), steps=STOP, world_size=ranks),
            Play(scene=name, run_dir=str(tmp_path / "parts"), steps=STEPS, world_size=ranks, resume=True),
        ]
    )

    for each in (whole, first, second):
        assert set(each.codes) == {0}, each.said
    for rank, expected in enumerate(whole.prints):
        assert first.prints[rank] == {step: expected[step] for step in map(str, range(1, STOP + 1))}, first.said
        assert second.prints[rank] == {step: expected[step] for step in map(str, range(STOP, STEPS + 1))}, second.said


@pytest.mark.campaign
@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_cannot_come_back_is_refused_by_name_before_a_step_is_committed(tmp_path: Path, name: str) -> None:
    [ended] = play([Play(scene=name, run_dir=str(tmp_path), steps=STOP)])

    assert set(ended.codes) == {78}, ended.said
    assert re.search(REASONS[name], ended.said), ended.said
    assert not any(tmp_path.glob("checkpoints/step_*"))


@pytest.mark.campaign
@pytest.mark.parametrize("name", sorted(NOT_RESUMED))
def test_what_a_new_process_does_not_have_is_refused_by_name_on_all_ranks(tmp_path: Path, name: str) -> None:
    first, second = play(
        [
            Play(scene=name, run_dir=str(tmp_path), steps=STOP),
            Play(scene=name, run_dir=str(tmp_path), steps=STEPS, resume=True),
        ]
    )

    assert set(first.codes) == {0}, first.said
    assert set(second.codes) == {66}, second.said
    assert re.search(AT_RESUME[name], second.said), second.said


@pytest.mark.campaign
def test_a_group_that_a_resume_would_miss_is_told_when_training_removes_it(tmp_path: Path) -> None:
    [ended] = play([Play(scene="a_group_that_training_removes", run_dir=str(tmp_path), steps=STOP)])

    assert len(re.findall(r"optimizer_has_fewer_groups part=optimizer groups=1 before=2", ended.said)) == 2, ended.said


@pytest.mark.campaign
def test_a_buffer_that_a_resume_would_refuse_is_told_when_training_makes_it(tmp_path: Path) -> None:
    [ended] = play([Play(scene="a_buffer_that_nobody_has_declared", run_dir=str(tmp_path), steps=STOP)])

    said = [line for line in ended.said.splitlines() if "module_has_new_tensors" in line]
    assert len(said) == 2, ended.said  # once on each rank
    assert all("model.late" in line and "register_buffer" in line for line in said)
