"""Copies of a tensor on several ranks: compared at each save, and where they differ it is said."""

from __future__ import annotations

import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import MetadataIndex

from stepkeeper_trainer.replicas import BUCKETS_MAX, Digest, Replicas, compare, digest, find_replicas


def held(plans: list[list[str]]) -> tuple[list[Replicas], tuple[tuple[str, ...], ...]]:
    return find_replicas([[MetadataIndex(name, torch.Size([0])) for name in plan] for plan in plans])


def told(replicas: Replicas, values: dict[str, bytes]) -> tuple[Digest, ...]:
    return digest(replicas, lambda name: memoryview(values[name]))


def test_what_one_rank_holds_alone_is_no_replica() -> None:
    replicas, groups = held([["a", "own0"], ["a", "own1"]])

    assert groups == (("a",),)
    assert [one.names for one in replicas] == [{"a"}, {"a"}]


def test_shards_of_one_tensor_are_compared_with_their_own_copies_only() -> None:
    """Two copies of two shards, as hybrid sharding has them."""
    plans = [[MetadataIndex("w", torch.Size([4 * (rank % 2)]))] for rank in range(4)]

    replicas, groups = find_replicas(plans)

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
