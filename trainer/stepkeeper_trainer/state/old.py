"""Step directories of version 0.1: one description for all ranks, and one for what each rank has by itself.

Parts beside the model and the only optimizer were called `others.NAME` and `optimizers.NAME` then.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stepkeeper_trainer.errors import ResumeError
from stepkeeper_trainer.state.tree import from_blob

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
