"""A part of the state that is anything with `state_dict` and `load_state_dict`: a scheduler, a loader, an average."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch

from stepkeeper_trainer.state.tree import join, split

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch.distributed.checkpoint.metadata import TensorStorageMetadata


class Stateful(Protocol):
    """What a scheduler, a sampler or anything else needs to be saved."""

    def state_dict(self) -> dict[str, Any]:
        """Return tensors and JSON."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> Any:
        """Take back what `state_dict` returned."""
        ...


class StatefulPart:
    """Saved and loaded by its own two methods."""

    def __init__(self, name: str, value: Stateful) -> None:
        """Take an object; `name` begins the names of its tensors."""
        self.name, self.value = name, value

    @property
    def of_one_rank(self) -> bool:
        """Whether its state has a meaning on as many ranks only, also where it is equal on all of them.

        A loader of torchdata counts batches of its own rank: on more ranks that count is another place in the data.
        """
        kinds = type(self.value).__mro__
        return bool(getattr(self.value, "per_rank", False)) or any(
            kind.__module__.partition(".")[0] == "torchdata" for kind in kinds
        )

    def collect(self, tensors: dict[str, torch.Tensor]) -> Any:
        """Put its tensors into `tensors`, and return the rest as JSON.

        Raises:
            StateError: something is neither a tensor nor JSON.
        """
        return split(self.value.state_dict(), self.name, tensors)

    def targets(self, skeleton: Any, saved: Mapping[str, TensorStorageMetadata]) -> dict[str, torch.Tensor]:
        """Return tensors to load into, like those that it has now where they fit."""
        here: dict[str, torch.Tensor] = {}
        split(self.value.state_dict(), self.name, here)
        found: dict[str, torch.Tensor] = {}
        for name in tensor_names(skeleton):
            entry, like = saved[name], here.get(name)
            if like is not None and like.size() == entry.size:
                found[name] = torch.zeros_like(like, dtype=entry.properties.dtype, requires_grad=False)
            else:
                found[name] = torch.empty(entry.size, dtype=entry.properties.dtype)
        return found

    def apply(self, skeleton: Any, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take back what was saved."""
        self.value.load_state_dict(join(skeleton, tensors))


def tensor_names(skeleton: Any) -> list[str]:
    """Return the names of all tensors that a skeleton of `split` refers to."""
    match skeleton:
        case {"$tensor": str(name)} | {"$ndarray": str(name)}:
            return [name]
        case dict():
            return [name for item in skeleton.values() for name in tensor_names(item)]
        case list():
            return [name for item in skeleton for name in tensor_names(item)]
    return []
