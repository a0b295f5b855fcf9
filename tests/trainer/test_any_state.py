"""Each rank gets back exactly what it had, whatever the parallelism: nothing but content says what ranks share."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from stepkeeper_trainer.formats.manifest import read_manifest
from stepkeeper_trainer.formats.steps import list_steps
from stepkeeper_trainer.formats.verify import verify
from tests.trainer import common_scenes
from tests.trainer.any_state import SCENES, Play, Played, play
from tests.trainer.common_scenes import COMMON
from tests.trainer.fsdp import needs_fsdp

EQUAL_BY_NO_TYPE = ("stages_that_are_sharded", "stages_of_data_parallel_ranks", "local_experts")
RANKS = {
    "local_experts": 4,
    "hsdp": 4,
    "a_replica_of_shards_that_drifts": 4,
    "an_actor_that_drifts": 4,
    "tensor_parallel": 4,
    "stages_that_are_sharded": 4,
    "stages_of_data_parallel_ranks": 4,
} | common_scenes.RANKS
REFUSED = {"fsdp1"}
FSDP = {
    "fsdp2", "hsdp", "tensor_parallel", "stages_that_are_sharded", "hsdp_and_tensor_parallel",
    "experts_of_a_mesh_and_of_each_rank", "a_replica_of_shards_that_drifts",
}  # fmt: skip
STEPS, STOP = 5, 3


IN_EACH_RUN = {
    "zero1", "local_experts", "loader_of_each_rank", "a_module_with_a_version", "weights_that_training_unfreezes",
    "values_of_more_kinds", "schedules_and_a_scaler",
}  # fmt: skip
"""Other scenes are played by the campaign."""

Of = Callable[[str], list[Played]]
pipelines = pytest.mark.skipif(
    torch.__version__.startswith("2.6."), reason="torch.distributed.pipelining of torch 2.6 hangs over gloo"
)


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Of:
    """A scene without an interruption, interrupted, and resumed."""
    root = tmp_path_factory.mktemp("any-state")

    @cache
    def of(name: str) -> list[Played]:
        ranks = RANKS.get(name, 2)
        return play(
            [
                Play(scene=name, run_dir=str(root / f"{name}-whole"), steps=STEPS, world_size=ranks, every=100),
                Play(scene=name, run_dir=str(root / name), steps=STOP, world_size=ranks),
                Play(scene=name, run_dir=str(root / name), steps=STEPS, world_size=ranks, resume=True),
            ]
        )

    return of


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name,
            marks=[needs_fsdp] * (name in FSDP)
            + [pipelines] * (name == "a_pipeline_of_torch")
            + [pytest.mark.campaign] * (name not in IN_EACH_RUN),
        )
        for name in sorted((SCENES.keys() - REFUSED) | COMMON.keys())
    ],
)
def test_a_resume_goes_on_to_the_last_bit(played: Of, name: str) -> None:
    whole, first, second = played(name)
    for each in (whole, first, second):
        assert set(each.codes) == {0}, each.said

    for rank, expected in enumerate(whole.prints):
        assert first.prints[rank] == {step: expected[step] for step in map(str, range(1, STOP + 1))}, first.said
        assert second.prints[rank] == {step: expected[step] for step in map(str, range(STOP, STEPS + 1))}, second.said
    if name in EQUAL_BY_NO_TYPE:
        assert "replicas_differ" not in whole.said + first.said + second.said


def test_each_value_is_written_once_for_those_who_hold_it_alike(played: Of) -> None:
    """Two pairs of ranks hold the same expert: four ranks write two of it, and one trunk."""
    run_dir = Path(played("local_experts")[1].run_dir)
    [newest, *_] = list_steps(run_dir / "checkpoints")
    names = saved_names(newest.path)

    assert "model.trunk.0.weight" in names
    assert "ranks.rank_00001.model.expert.0.weight" in names
    assert not any(name.startswith("ranks.rank_") and "trunk" in name for name in names)
    assert not any(name.startswith(("ranks.rank_00002.", "ranks.rank_00003.")) for name in names)
    assert verify(newest.path).problems == ()


def test_a_save_that_finds_unequal_values_is_taken_again_and_is_no_failure(played: Of) -> None:
    """The ranks and names are told with it; each name costs one save."""
    first = played("local_experts")[1]

    said = [line for line in first.said.splitlines() if re.search("save_taken_again|kept_for_each_rank", line)]
    again = [line for line in said if "save_taken_again" in line]
    assert "expert.0.weight" in again[0]
    assert re.search(r"kept_for_each_rank .*expert.0.weight.* ranks=", first.said), first.said
    assert len({line for line in again if "expert.0.weight" in line}) == 1, again
    assert "save_failed" not in first.said


def test_no_save_begins_while_ranks_find_out_what_differs(tmp_path: Path) -> None:
    """It would find the same names once more."""
    play_ = Play(scene="experts_that_are_compared_slowly", run_dir=str(tmp_path / "run"), steps=10, world_size=2)

    [ended] = play([play_])

    assert ended.codes == [0, 0], ended.said
    assert len(re.findall(r"save_taken_again .*expert\.0\.weight", ended.said)) == 1, ended.said
    assert "save_failed" not in ended.said


def test_a_replica_that_differs_is_told_with_its_rank_and_both_are_kept(tmp_path: Path) -> None:
    """Of three ranks: where two agree, the third one is named."""
    [first] = play([Play(scene="a_replica_that_drifts", run_dir=str(tmp_path / "run"), steps=STOP, world_size=3)])
    [newest, *_] = list_steps(Path(first.run_dir) / "checkpoints")

    [told, *_] = [line for line in first.said.splitlines() if "replicas_differ" in line]
    assert "step=3" in told
    assert "model.0.weight" in told
    assert "ranks=2 " in told
    assert "model.0.weight" in read_manifest(newest.path).state["drift"]
    assert {"model.0.weight", "ranks.rank_00002.model.0.weight"} <= saved_names(newest.path)


def test_a_replica_of_a_group_that_alone_has_its_names_is_told(tmp_path: Path) -> None:
    play_ = Play(scene="an_actor_that_drifts", run_dir=str(tmp_path / "run"), steps=STOP, world_size=4)

    [ended] = play([play_])

    assert re.search(r"replicas_differ step=3 tensors=\S*actor\.0\.weight", ended.said), ended.said


@needs_fsdp
def test_a_shard_that_differs_from_its_replica_is_told(tmp_path: Path) -> None:
    play_ = Play(scene="a_replica_of_shards_that_drifts", run_dir=str(tmp_path / "run"), steps=STOP, world_size=4)

    [ended] = play([play_])

    assert re.search(r"replicas_differ step=3 tensors=\S*model\.0\.weight", ended.said), ended.said


@pytest.mark.parametrize(
    ("name", "ranks", "told"),
    [
        ("local_experts", 2, r"2 ranks cannot resume what 4 saved: ranks hold different values of .*expert"),
        ("loader_of_each_rank", 4, r"4 ranks cannot resume what 2 saved: ranks hold different values of loader;"),
    ],
)
def test_what_only_as_many_ranks_can_take_is_named_before_anything_is_loaded(
    played: Of, name: str, ranks: int, told: str
) -> None:
    run_dir = played(name)[1].run_dir

    [ended] = play([Play(scene=name, run_dir=run_dir, steps=STEPS, world_size=ranks, resume=True)])

    assert set(ended.codes) == {66}, ended.said
    assert re.search(told, ended.said), ended.said


OTHER_RANKS = [
    ("plain", 2, 4), ("fsdp2", 2, 4), ("fsdp2", 4, 2), ("hsdp", 4, 2), ("tensor_parallel", 4, 2),
    ("tensor_parallel_alone", 2, 1), ("tensor_parallel_alone", 1, 2), ("gan", 2, 3), ("lbfgs", 2, 1),
    ("converted", 2, 1), ("moments_of_another_type", 2, 3), ("quantized_moments", 2, 1), ("averages_of_torch", 2, 3),
    ("schedules_and_a_scaler", 2, 3), ("muon_and_sparse_adam", 2, 3), ("a_module_with_a_version", 2, 3),
    ("weights_that_training_unfreezes", 2, 3), ("frozen_weights_that_no_state_has", 2, 3),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "then", "ranks"),
    [
        pytest.param(*one, marks=[needs_fsdp] * (one[0] in FSDP) + [pytest.mark.campaign] * (one[0] != "fsdp2"))
        for one in OTHER_RANKS
    ],
)
def test_what_is_sharded_or_equal_everywhere_is_the_same_on_other_numbers_of_ranks(
    tmp_path: Path, name: str, then: int, ranks: int
) -> None:
    """Whole tensors, options and numbers of each part are those of the save, and training goes on."""
    first, second = play(
        [
            Play(scene=name, run_dir=str(tmp_path), steps=STOP, world_size=then, whole=True),
            Play(scene=name, run_dir=str(tmp_path), steps=STEPS, world_size=ranks, resume=True, whole=True),
        ]
    )

    assert set(first.codes) == set(second.codes) == {0}, first.said + second.said
    for rank in range(ranks):
        assert second.prints[rank][str(STOP)] == first.prints[0][str(STOP)], f"rank {rank}\n{second.said}"


def test_what_cannot_be_saved_right_is_refused_by_name_before_the_first_step(tmp_path: Path) -> None:
    [ended] = play([Play(scene="fsdp1", run_dir=str(tmp_path / "run"), steps=2, world_size=2)])

    assert set(ended.codes) == {78}, ended.said
    assert "model is sharded by FullyShardedDataParallel (FSDP1)" in ended.said
    assert not any((tmp_path / "run").glob("checkpoints/step_*"))


def saved_names(directory: Path) -> set[str]:
    return set(dcp.FileSystemReader(directory).read_metadata().state_dict_metadata)
