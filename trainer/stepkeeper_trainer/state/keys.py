"""By which keys values lie in a step directory: those of single ranks, and those that older versions wrote.

What all ranks hold alike is kept once, anything else for those who hold it.  A name has one *base* copy, saved under
the name itself: that of the lowest rank that holds it.  Ranks that hold another value, shape or sharding under the same
name save it under `ranks.rank_RRRRR.<name>`, with the lowest rank of those who hold it alike.  Copies are only ever
told apart more finely, so a plan that was right stays right.  What is compared comes from the planner, and what is
decided goes back to all ranks.

Version 0.1 had one description for all ranks, and one for what each rank has by itself.  Until there was a
CheckpointManager, parts beside the model and the only optimizer were called `others.NAME` and `optimizers.NAME`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from stepkeeper_trainer.errors import ResumeError
from stepkeeper_trainer.state.tree import from_blob

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


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


def mesh_size(kind: Any) -> int:
    """Return how many ranks the mesh of a DTensor has, by its `kind_of`."""
    return math.prod(kind[3])


def _owner(key: str | None) -> int | None:
    return None if key is None else int(key[len("ranks.rank_") :][:5])


def blob_of(rank: int) -> str:
    """Return the key of what a rank has by itself."""
    return f"ranks.rank_{rank:05d}.json"


def names_then(counters: Mapping[str, Any], parts: Iterable[str]) -> dict[str, str]:
    """Return what each part is called in a checkpoint."""
    if "parts" in counters:
        saved = set(counters["parts"])
    else:
        several = counters["optimizer"].get("several")
        saved = {"model"} | ({f"optimizers.{name}" for name in several} if several is not None else {"optimizer"})
        saved |= {f"others.{name}" for name in [*counters["others"], *counters.get("per_rank", ())]}
    return {
        name: next((was for was in (name, f"others.{name}", f"optimizers.{name}") if was in saved), name)
        for name in parts
    }


class Renaming:
    """What keys and names of a checkpoint are called today."""

    def __init__(self, then: Mapping[str, str], optimizers: Iterable[str]) -> None:
        """Take what each part was called, by the name that it has now, and which parts are optimizers."""
        self._now = {was: name for name, was in then.items() if was != name}
        self._states = [f"{name}.state." for name in optimizers]  # there the name of a parameter follows

    def __bool__(self) -> bool:
        return bool(self._now)

    def name(self, name: str) -> str:
        """Return the name of a tensor or a parameter, which begins with that of its part.

        >>> Renaming({"ema": "others.ema"}, []).name("others.ema.weight")
        'ema.weight'
        """
        was = next((was for was in self._now if name.startswith(f"{was}.")), "")
        return f"{self._now[was]}{name.removeprefix(was)}" if was else name

    def key(self, key: str) -> str:
        """Return the key of a value that is not one rank's own."""
        if key.startswith(TREE_PREFIX):
            was = key.removeprefix(TREE_PREFIX)
            return f"{TREE_PREFIX}{self._now.get(was, was)}"
        key = self.name(key)
        state = next((state for state in self._states if key.startswith(state)), "")
        return f"{state}{self.name(key.removeprefix(state))}" if state else key

    def skeleton(self, tree: Any, was: str) -> Any:
        """Return the skeleton of a module or an optimizer that was called `was`; tensors keep their names in it."""
        if "param_groups" in tree:
            columns = {key: names if names is True else self._names(names) for key, names in tree["columns"].items()}
            return {
                **tree,
                "columns": columns,
                "rest": {self.name(name): values for name, values in tree["rest"].items()},
                "param_groups": [{**group, "params": self._names(group["params"])} for group in tree["param_groups"]],
            }
        return {**tree, "called": was, "extra": {self.name(key): extra for key, extra in tree["extra"].items()}}

    def _names(self, names: Iterable[str]) -> list[str]:
        return [self.name(name) for name in names]


def read_old(
    counters: Mapping[str, Any], blobs: Mapping[str, torch.Tensor], rank: int, world_size: int, parts: Iterable[str]
) -> dict[str, Any]:
    """Return the skeletons of all parts.

    Raises:
        ResumeError: the parts are others, or another number of ranks cannot take the state.
    """
    optimizer = counters["optimizer"]
    found: dict[str, Any] = {"model": None}
    if "several" in optimizer:
        found |= {f"optimizers.{name}": _optimizer(tree) for name, tree in optimizer["several"].items()}
    else:
        found["optimizer"] = _optimizer(optimizer)
    found |= {f"others.{name}": tree for name, tree in counters["others"].items()}
    if own := counters.get("per_rank"):
        if counters["world_size"] != world_size:
            raise ResumeError(
                f"{', '.join(own)}: each rank has its own position in the data there, so {world_size} ranks cannot go "
                f"on where {counters['world_size']} were: resume on {counters['world_size']}"
            )
        trees = from_blob(blobs[blob_of(rank)], name=blob_of(rank))
        found |= {f"others.{name}": trees[name] for name in own}
    if set(found) != set(parts):
        raise ResumeError(
            f"the checkpoint's parts are {sorted(found)}, this script's {sorted(parts)}: "
            "resume with the script and settings that it was made with"
        )
    return found


def _optimizer(tree: dict[str, Any]) -> dict[str, Any]:
    """Return an optimizer's description as it is written today."""
    if "columns" in tree:
        return tree
    return {"columns": {}, "rest": tree["state"], "param_groups": tree["param_groups"]}
