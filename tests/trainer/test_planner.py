"""What ranks are told of their shares of a save."""

from __future__ import annotations

import dataclasses
import pickle

import pytest
import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner, create_default_local_save_plan
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from stepkeeper_trainer.save.division import Held, World
from stepkeeper_trainer.save.planner import share_of
from stepkeeper_trainer.save.replicas import hash_tensor
from stepkeeper_trainer.state.keys import key_of

RANKS = 16


def test_a_share_that_was_sent_is_what_it_was_and_costs_no_name_of_all_that_is_replicated() -> None:
    """As data-parallel ranks have it: each holds everything, and a part of its own in between."""
    names = [f"model.layers.{number}.attention.projection.weight" for number in range(2000)]
    state: list[dict[str, torch.Tensor]] = [{name: torch.zeros(1) for name in names} for _ in range(RANKS)]
    for rank, own in enumerate(state):
        own[f"a part of rank {rank}"] = torch.zeros(1)
        if rank % 2:
            own[names[0]] = own.pop(names[0])  # in another order than on the others
    plans = [create_default_local_save_plan(own, rank == 0) for rank, own in enumerate(state)]

    held = [Held.of(plan, own, {}, {}) for plan, own in zip(plans, state, strict=True)]
    parts, metadata, groups = World(held).share_out()
    sent = [pickle.dumps(part) for part in parts]

    shares = [share_of(pickle.loads(data), plan) for data, plan in zip(sent, plans, strict=True)]  # noqa: S301  # our own bytes
    for rank, share in enumerate(shares):
        assert share.replicas.groups == ((0, groups[0]),)
        assert f"a part of rank {rank}" in share.names
    assert sorted(groups[0]) == sorted(names)
    written = [index for share in shares for index in share.items]
    assert sorted(index.fqn for index in written) == sorted(metadata.state_dict_metadata)
    assert max(len(share.items) for share in shares) - min(len(share.items) for share in shares) <= 1
    assert max(map(len, sent)) < sum(map(len, names)) / 2


def test_torch_divides_alike_whatever_the_ranks_hold() -> None:
    """Sharded tensors of two shapes, one that all hold, one of a rank's own, and one that two ranks hold apart."""

    def shard(name: str, rows: int, rank: int) -> WriteItem:
        part = rows // RANKS
        offset, size = torch.Size([rank * part, 0]), torch.Size([part, 3])
        data = TensorWriteData(ChunkStorageMetadata(offset, size), TensorProperties(), torch.Size([rows, 3]))
        return WriteItem(MetadataIndex(name, offset), WriteItemType.SHARD, tensor_data=data)

    plans = []
    for rank in range(RANKS):
        own = {
            "all": torch.zeros(5),
            f"own{rank}": torch.zeros(2),
            **({"few": torch.zeros(7)} if rank in (3, 9) else {}),
        }
        items = create_default_local_save_plan(own, rank == 0).items
        plans.append(SavePlan([*items, *(shard(f"w{n}", 16 * (1 + n % 2), rank) for n in range(6))]))
    held = [Held.of(plan, {item.index.fqn: torch.zeros(1) for item in plan.items}, {}, {}) for plan in plans]

    parts, metadata, groups = World(held).share_out()

    _, theirs = DefaultSavePlanner().create_global_plan([dataclasses.replace(plan, planner_data={}) for plan in plans])
    ours = metadata.state_dict_metadata
    assert ours == theirs.state_dict_metadata
    assert ours["w0"] is ours["w2"], "what lies alike is kept once"
    assert set(groups) == {("all",), ("few",)}
    written = [index for part, plan in zip(parts, plans, strict=True) for index in part.items(plan)]
    assert len(written) == len(set(written)) == sum(len(getattr(entry, "chunks", [0])) for entry in ours.values())
    for index in written:
        entry = ours[index.fqn]
        assert isinstance(entry, TensorStorageMetadata)
        assert index.index is not None
        assert entry.chunks[index.index].offsets == index.offset


def test_pieces_that_leave_a_hole_are_refused() -> None:
    plans = [create_default_local_save_plan({"w": torch.zeros(4)}, rank == 0) for rank in range(2)]
    data = TensorWriteData(ChunkStorageMetadata(torch.Size([0]), torch.Size([3])), TensorProperties(), torch.Size([4]))
    for plan in plans:
        plan.items[0] = dataclasses.replace(plan.items[0], tensor_data=data)

    with pytest.raises(ValueError, match="invalid fill"):
        World([Held.of(plan, {"w": torch.zeros(4)}, {}, {}) for plan in plans]).share_out()


def test_a_value_of_a_ranks_own_is_told_apart_and_stays_so() -> None:
    """Rank 1 holds other bytes of one name, and another shape of a second one."""
    state = [
        {"a": torch.zeros(2), "rng": torch.full((4,), rank == 1), "w": torch.zeros(3 + (rank == 1))}
        for rank in range(3)
    ]
    hashes = [{"rng": hash_tensor(own["rng"])} for own in state]
    plans = [create_default_local_save_plan(own, rank == 0) for rank, own in enumerate(state)]
    held = [Held.of(plan, own, hashed, {}) for plan, own, hashed in zip(plans, state, hashes, strict=True)]

    private, _ = World(held).private()

    own = {"rng": key_of(1, "rng"), "w": key_of(1, "w")}
    assert private == [{}, own, {}]
    renamed = [
        {keys.get(name, name): tensor for name, tensor in part.items()}
        for keys, part in zip(private, state, strict=True)
    ]
    plans = [create_default_local_save_plan(part, rank == 0) for rank, part in enumerate(renamed)]
    held = [Held.of(plan, part, {}, keys) for plan, part, keys in zip(plans, renamed, private, strict=True)]
    world = World(held)
    assert world.private()[0] == private
    assert len({each.names for each in held}) == 1, "ranks with private values send the same names"
    parts, metadata, _ = world.share_out()
    assert set(metadata.state_dict_metadata) == {"a", "rng", "w", *own.values()}
    assert {index.fqn for index in parts[1].items(plans[1])} >= set(own.values())
