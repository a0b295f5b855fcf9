"""Copies of a tensor on several ranks: compared at each save, and where they differ it is said."""

from __future__ import annotations

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.default_planner import create_default_local_save_plan
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from stepkeeper_trainer.save import replicas as comparing
from stepkeeper_trainer.save.division import Held, World
from stepkeeper_trainer.save.replicas import (
    BUCKETS_MAX,
    IN_PLACE_BYTES,
    ROW,
    Digest,
    Hash,
    Replicas,
    compare,
    digest,
    hash_bytes,
    hash_rows,
)
from stepkeeper_trainer.save.staging import Staging


def share_out(plans: list[SavePlan]) -> tuple[list[Replicas], tuple[tuple[str, ...], ...]]:
    held = [Held.of(plan, {item.index.fqn: torch.zeros(8) for item in plan.items}, {}, {}) for plan in plans]
    parts, _, groups = World(held).share_out()
    return [part.named_replicas(plan) for part, plan in zip(parts, plans, strict=True)], groups


def held(plans: list[list[str]]) -> tuple[list[Replicas], tuple[tuple[str, ...], ...]]:
    return share_out([create_default_local_save_plan({name: torch.zeros(1) for name in plan}, True) for plan in plans])  # noqa: FBT003


def told(replicas: Replicas, values: dict[str, bytes]) -> tuple[Digest, ...]:
    return digest(replicas, lambda name: hash_bytes(values[name]))


def test_what_one_rank_holds_alone_is_no_replica() -> None:
    replicas, groups = held([["a", "own0"], ["a", "own1"]])

    assert groups == (("a",),)
    assert [one.names for one in replicas] == [{"a"}, {"a"}]


def test_shards_of_one_tensor_are_compared_with_their_own_copies_only() -> None:
    """Two copies of two shards, as hybrid sharding has them."""

    def shard(number: int) -> WriteItem:
        offset, size = torch.Size([4 * number]), torch.Size([4])
        data = TensorWriteData(ChunkStorageMetadata(offset, size), TensorProperties(), torch.Size([8]))
        return WriteItem(MetadataIndex("w", offset), WriteItemType.SHARD, tensor_data=data)

    replicas, groups = share_out([SavePlan([shard(rank % 2)]) for rank in range(4)])

    assert len(groups) == 2
    reports = {rank: told(replicas[rank], {"w": b"01"[rank % 2 :][:1]}) for rank in range(4)}
    assert compare(reports, groups) == []
    reports[3] = told(replicas[3], {"w": b"x"})
    [drift] = compare(reports, groups)
    assert drift.names == ("w",)
    assert drift.ranks == (1, 3)


def test_the_rank_that_differs_is_named_where_most_agree() -> None:
    replicas, groups = held([["a", "b"]] * 3)
    values = {"a": b"same", "b": b"same"}
    reports = {rank: told(replicas[rank], values | ({"b": b"samf"} if rank == 1 else {})) for rank in range(3)}

    [drift] = compare(reports, groups)

    assert (drift.names, drift.ranks) == (("b",), (1,))


@given(
    count=st.integers(1, 3 * BUCKETS_MAX),
    changed=st.data(),
)
@settings(max_examples=10, deadline=None, phases=(Phase.explicit, Phase.generate))
def test_any_changed_tensor_is_among_those_named(count: int, changed: st.DataObject) -> None:
    names = [f"t{n}" for n in range(count)]
    replicas, groups = held([names] * 2)
    odd = changed.draw(st.sampled_from(names))
    reports = {
        rank: told(replicas[rank], {name: b"x" if rank and name == odd else b"y" for name in names})
        for rank in range(2)
    }

    [drift] = compare(reports, groups)

    assert odd in drift.names
    assert len(drift.names) <= -(-count // BUCKETS_MAX)
    assert len(reports[0][0].buckets) <= 16 * BUCKETS_MAX, "a report stays small"


def test_what_a_rank_did_not_look_at_or_hashed_another_way_counts_as_different() -> None:
    """One copy of two is saved for both only where they are known to be equal."""
    replicas, groups = held([["a", "b"]] * 2)
    looked = told(replicas[0], {"a": b"1", "b": b"2"})
    unseen = digest(replicas[1], lambda name: None if name == "a" else hash_bytes(b"2"))
    other_way = digest(replicas[1], lambda _name: Hash(b"12345678", "rows"))

    assert [drift.names for drift in compare({0: looked, 1: unseen}, groups)] == [("a",)]
    assert [drift.names for drift in compare({0: looked, 1: other_way}, groups)] == [("a",), ("b",)]


def staging_of(tensors: dict[str, torch.Tensor], own: list[str], *, device: bool = False) -> Staging:
    staging = Staging(device=device)
    staging.take(tensors)
    staging.regroup([own], compared=list(tensors))
    return staging


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.complex64])
def test_a_large_tensor_of_another_rank_is_hashed_where_it_is_as_its_owner_hashes_what_it_staged(
    dtype: torch.dtype,
) -> None:
    numbers = torch.rand(300, IN_PLACE_BYTES // 256).to(dtype)
    tensors = {
        "plain": numbers,
        "turned": numbers.t(),
        "small": numbers[0],
        "parameter": torch.nn.Parameter(torch.rand(IN_PLACE_BYTES)),
    }
    owner, other = staging_of(tensors, list(tensors)), staging_of(tensors, ["small"])

    owner.copy(tensors)
    assert other.copy_if_it_fits(tensors)

    assert other.arena.bytes < IN_PLACE_BYTES < owner.arena.bytes
    for name in tensors:
        assert owner.hash_of(name) == other.hash_of(name) is not None, name
    before = other.hash_of("plain")
    numbers.view(torch.uint8)[7, 7] ^= 1
    assert other.hash_of("plain") == before, "it is of the moment of the copy"
    assert other.copy_if_it_fits(tensors)
    assert other.hash_of("plain") != before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.complex64])
@pytest.mark.parametrize("shape", [(), (3,), (ROW,), (5, ROW), (7, ROW + 1), (1, 3, 1, 8 * ROW)])
def test_each_bit_counts_in_the_hash_of_rows(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Which is what a GPU is asked for."""
    tensor = torch.rand(shape).to(dtype)
    rows = hash_rows(tensor)

    assert torch.equal(rows, hash_rows(tensor.clone()))
    assert rows.numel() <= 1 + tensor.nbytes // ROW
    flat = tensor.view(-1).view(torch.uint8)
    for at in {0, flat.numel() // 2, flat.numel() - 1}:
        flat[at] ^= 1
        assert not torch.equal(rows, hash_rows(tensor))
        flat[at] ^= 1


@pytest.mark.parametrize(
    ("one", "other"),
    [
        pytest.param(torch.zeros(ROW * 4), torch.ones(ROW * 4), id="constants"),
        pytest.param(torch.full((ROW * 4,), 1.0), torch.full((ROW * 4,), 7.0), id="other constants"),
        pytest.param(torch.arange(ROW * 4.0), torch.arange(ROW * 4.0).flip(0), id="another order"),
        pytest.param(torch.eye(64)[3], torch.eye(64)[4], id="one hot"),
        pytest.param(torch.ones(ROW * 2), torch.ones(ROW * 2) * torch.tensor([-1.0, -1.0] * ROW), id="signs"),
        pytest.param(torch.tensor([1.0, 2.0] * ROW), torch.tensor([2.0, 1.0] * ROW), id="pairs swapped"),
        pytest.param(torch.zeros(3, dtype=torch.uint8), torch.zeros(3, dtype=torch.uint8) + 1, id="bytes"),
    ],
)
def test_values_that_a_plain_sum_or_xor_would_not_tell_apart_have_other_hashes(
    one: torch.Tensor, other: torch.Tensor
) -> None:
    """What all ranks hold alike is saved once: a wrong yes would give a rank another one's values."""
    assert not torch.equal(hash_rows(one), hash_rows(other))


@given(st.data())
@settings(max_examples=50, deadline=None)
def test_sign_bits_that_change_in_pairs_change_the_hash(data: st.DataObject) -> None:
    words = torch.zeros(ROW, dtype=torch.int64)
    changed = words.clone()
    for place in data.draw(st.lists(st.integers(0, ROW - 1), min_size=1, max_size=6, unique=True)):
        changed[place] = -(1 << 63)

    assert not torch.equal(hash_rows(words), hash_rows(changed))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.float64], ids=str)
@pytest.mark.parametrize("count", [0, 1, 2048, 5000, 5001])
def test_views_of_a_flat_buffer_hash_by_their_values_wherever_they_begin(
    dtype: torch.dtype, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that begins between two wider numbers raised an error, and the save came to nothing."""
    monkeypatch.setattr(comparing, "BLOCK_BYTES", 2 * 8 * ROW)  # several blocks
    values = (torch.arange(count) % 97).to(dtype)
    for offset in (0, 1, 2, 3):
        buffer = torch.zeros(count + 8, dtype=dtype)
        view = buffer[offset : offset + count]
        view.copy_(values)

        assert torch.equal(hash_rows(view), hash_rows(values))
