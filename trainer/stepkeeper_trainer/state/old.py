"""Step directories of older versions, read as if a version of today had written them.

Version 0.1 had one description for all ranks, and one for what each rank has by itself.  Until there was a
CheckpointManager, parts beside the model and the only optimizer were called `others.NAME` and `optimizers.NAME`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stepkeeper_trainer.errors import ResumeError
from stepkeeper_trainer.state.tree import from_blob
from stepkeeper_trainer.state.variants import TREE_PREFIX

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    import torch


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


def read(
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
