"""Which rank has which copy of a value: what all ranks hold alike is kept once, anything else for those who hold it.

A name has one *base* copy, saved under the name itself: that of the lowest rank that holds it.  Ranks that hold another
value, shape or sharding under the same name save it under `ranks.rank_RRRRR.<name>`, with the lowest rank of those who
hold it alike.  Copies are only ever told apart more finely, so a plan that was right stays right.

What is compared comes from the planner, and what is decided goes back to all ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

TREE_PREFIX = "keeper.tree."  # of the skeletons of parts
Private = dict[str, str]  # names on one rank, and the keys under which their values are saved


class Look(NamedTuple):
    """What one rank holds under a name: equal looks are equal values, as far as anybody has looked."""

    kind: Any  # size, type and how it is sharded
    box: Any  # which part of it this rank holds
    content: bytes | None  # its hash; None: not looked at


def divide(looks: Sequence[Mapping[str, Look]], before: Sequence[Private]) -> list[Private]:
    """Return the private names of each rank.

    Args:
        looks: of each rank, what it holds by name (its own names, not keys).
        before: the private names of each rank until now.

    >>> a, b = Look("f32[2]", None, b"1"), Look("f32[2]", None, b"2")
    >>> divide([{"w": a}, {"w": b}, {"w": b}], [{}, {}, {}])
    [{}, {'w': 'ranks.rank_00001.w'}, {'w': 'ranks.rank_00001.w'}]
    """
    holders: dict[str, list[int]] = {}
    for rank, own in enumerate(looks):
        for name in own:
            holders.setdefault(name, []).append(rank)
    found: list[Private] = [{} for _ in looks]
    for name, ranks in holders.items():
        base = (before[ranks[0]].get(name), looks[ranks[0]][name].kind)
        contents: dict[Any, Any] = {}  # of the base copy, box by box
        first: dict[Any, int] = {}
        for rank in ranks:
            look, known = looks[rank][name], before[rank].get(name)
            of_base = (known, look.kind) == base and contents.setdefault(look.box, look.content) == look.content
            if not of_base:
                owner = first.setdefault((known, *look), rank)
                found[rank][name] = key_of(owner, name)
    return found


def key_of(rank: int, name: str) -> str:
    """Return the key under which a rank saves a copy of its own."""
    return f"ranks.rank_{rank:05d}.{name}"


def pack(private: Sequence[Private]) -> list[Any]:
    """Return the private names of all ranks as JSON: names with one division among ranks are kept together.

    >>> pack([{}, {"w": "ranks.rank_00001.w", "v": "ranks.rank_00001.v"}])
    [[[None, 1], ['v', 'w']]]
    """
    owners: dict[tuple[int | None, ...], list[str]] = {}
    for name in sorted({name for own in private for name in own}):
        owner = tuple(_owner(own.get(name)) for own in private)
        owners.setdefault(owner, []).append(name)
    return [[list(owner), names] for owner, names in owners.items()]


def unpack(packed: Sequence[Any], rank: int) -> Private:
    """Return the private names of one rank; undoes `pack`.

    >>> unpack([[[None, 1], ["v", "w"]]], 1)
    {'v': 'ranks.rank_00001.v', 'w': 'ranks.rank_00001.w'}
    """
    return {name: key_of(owners[rank], name) for owners, names in packed for name in names if owners[rank] is not None}


def names_of(packed: Sequence[Any]) -> frozenset[str]:
    """Return the names of which some rank has a copy of its own."""
    return frozenset(name for _, names in packed for name in names)


def kind_of(tensor: torch.Tensor) -> Any:
    """Return what must be equal for two ranks' tensors of one name to be copies or shards of one value."""
    if type(tensor) is DTensor or isinstance(tensor, DTensor):
        spec = tensor._spec  # noqa: SLF001  # pinned by a test
        return (tuple(tensor.size()), str(tensor.dtype), str(spec.placements), tuple(spec.mesh.shape))
    return (tuple(tensor.size()), str(tensor.dtype))


def is_sharded(kind: Any) -> bool:
    """Whether `kind_of` was of a DTensor."""
    return len(kind) > 2  # noqa: PLR2004


def _owner(key: str | None) -> int | None:
    return None if key is None else int(key[len("ranks.rank_") :][:5])
