"""Where a tensor of a tree was: on which kind of device, and how it was sharded; and tensors to load it into.

A module's tensors are there before a resume, and an optimizer's lie as their parameters do.  What a script makes in
training (an average that begins late) is there only once it is loaded: the checkpoint says where.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed.tensor as dtensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from stepkeeper_trainer.errors import ResumeError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from torch.distributed.checkpoint.metadata import TensorStorageMetadata
    from torch.distributed.device_mesh import DeviceMesh


def placement_of(tensor: DTensor) -> dict[str, Any]:
    """Return as JSON how a tensor is sharded; `target_of` makes one from it."""
    placements: list[Any] = []
    for each in tensor.placements:
        if type(each) is Shard:
            placements.append(["shard", each.dim])
        else:
            placements.append(["replicate"] if type(each) is Replicate else [type(each).__name__])
    return {"size": list(tensor.size()), "mesh": tensor.device_mesh.mesh.tolist(), "placements": placements}


_PLACEMENTS: dict[str, Callable[..., Any]] = {"shard": Shard, "replicate": Replicate}


def _sharded(placed: Mapping[str, Any], dtype: torch.dtype, meshes: Iterable[DeviceMesh]) -> torch.Tensor | None:
    """Return zeros that are sharded like this, over one of the meshes; None where it is not among them."""
    mesh = next((each for each in meshes if can_shard(placed, each)), None)
    if mesh is None:
        return None
    placements = [_PLACEMENTS[kind](*rest) for kind, *rest in placed["placements"]]
    return dtensor.zeros(*placed["size"], dtype=dtype, device_mesh=mesh, placements=placements)


def can_shard(placed: Mapping[str, Any], mesh: DeviceMesh) -> bool:
    """Whether a tensor that is sharded like this can be made over a mesh."""
    return mesh.mesh.tolist() == placed["mesh"] and all(kind in _PLACEMENTS for kind, *_ in placed["placements"])


def meshes_of(tensors: Iterable[torch.Tensor]) -> list[DeviceMesh]:
    """Return the meshes over which tensors are sharded."""
    return list({id(each.device_mesh): each.device_mesh for each in tensors if isinstance(each, DTensor)}.values())


def target_of(
    name: str,
    place: Mapping[str, Any],
    entry: TensorStorageMetadata,
    *,
    like: torch.Tensor | None,
    meshes: Iterable[DeviceMesh] = (),
) -> torch.Tensor:
    """Return a tensor to load a value of a tree into, on the device that it was on, and sharded as it was.

    Args:
        name: of the value.
        place: what `tensor_places` says of it.
        entry: what the checkpoint has of it.
        like: what the script has there now: another sharding is a resharding.
        meshes: those that the script has.

    Raises:
        ResumeError: it was sharded over a mesh that the script does not have.
    """
    dtype, sharded = entry.properties.dtype, place.get("sharded")
    if sharded is not None:
        if isinstance(like, DTensor) and list(like.size()) == sharded["size"]:
            return torch.zeros_like(like, dtype=dtype, requires_grad=False)
        made = _sharded(sharded, dtype, meshes)
        if made is None:
            raise ResumeError(
                f"{name} is sharded over the ranks {sharded['mesh']} in the checkpoint, and the script has neither the "
                "tensor nor a parameter on that mesh: make the tensor before resume()"
            )
        return made
    if like is not None and like.size() == entry.size:
        return torch.zeros_like(like, dtype=dtype, requires_grad=False)
    device = place.get("device", "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        device = "cpu"
    return torch.empty(entry.size, dtype=dtype, device=device)
