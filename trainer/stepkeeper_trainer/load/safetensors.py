"""Loading safetensors files into a model: each rank reads its own part of each tensor, and nothing else.

For fine-tuning a published model, and for what `stepkeeper checkpoints export` wrote.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from stepkeeper_trainer.errors import DamagedError, ResumeError
from stepkeeper_trainer.formats import safetensors
from stepkeeper_trainer.state import plain_name, tied_names

if TYPE_CHECKING:
    from collections.abc import Mapping


NAMES_SHOWN = 5


def load_model(
    model: torch.nn.Module,
    source: str | os.PathLike[str],
    *,
    strict: bool = True,
    rename: Mapping[str, str] | None = None,
) -> list[str]:
    """Fill a model, sharded or not, from safetensors files, in place; numbers become the model's own dtype.

    Of a tensor that the model has under several names (tied weights) the files need to have one.

    Args:
        model: on any device; not on `meta`.
        source: a file, or a directory with `model.safetensors` or an index.
        strict: whether each tensor of the model must be there, and no other one.
        rename: the file's name for a name of the model, where they differ.

    Returns:
        the model's tensors that the files do not hold (only if not `strict`).

    Raises:
        ResumeError: the files are of another model.
        DamagedError: a file is damaged or missing.
    """
    wanted = {plain_name(name): value for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}
    slots = find_tensors(Path(source))
    homes = {name: (rename or {}).get(name, name) for name in wanted}
    filled = {name for name, home in homes.items() if home in slots}
    tied = tied_names(model)
    filled_ties = {tied.get(name, name) for name in filled}
    missing = sorted(name for name in wanted if name not in filled and tied.get(name, name) not in filled_ties)
    extra = sorted(slots.keys() - set(homes.values()))
    if strict and (missing or extra):
        raise ResumeError(
            f"{source}: of another model: lacks {some(missing)}; the model lacks {some(extra)}; "
            "give `rename`, or strict=False"
        )
    for name, home in homes.items():
        if home in slots and slots[home][1].shape != tuple(wanted[name].shape):
            raise ResumeError(
                f"{source}: {home} has shape {list(slots[home][1].shape)}, the model's {list(wanted[name].shape)}"
            )
    for path in sorted({slots[home][0] for home in homes.values() if home in slots}):
        here = {name: slots[home][1] for name, home in homes.items() if home in slots and slots[home][0] == path}
        _fill(path, {name: (wanted[name], slot) for name, slot in here.items()})
    return missing


def some(names: list[str]) -> str:
    """Return the first of many names as text."""
    shown = ", ".join(names[:NAMES_SHOWN]) or "nothing"
    return shown if len(names) <= NAMES_SHOWN else f"{shown} and {len(names) - NAMES_SHOWN} more"


def find_tensors(source: Path) -> dict[str, tuple[Path, safetensors.Slot]]:
    """Return where each tensor is; headers are checked before any byte is used.

    Raises:
        DamagedError: a file is damaged or missing.
    """
    slots: dict[str, tuple[Path, safetensors.Slot]] = {}
    try:
        for path in safetensors.find_files(source):
            for name, slot in safetensors.read_header(path)[0].items():
                if name in slots:
                    raise DamagedError(f"{source}: {name} is in {slots[name][0].name} and in {path.name}")
                slots[name] = (path, slot)
    except safetensors.SafetensorsError as error:
        raise DamagedError(str(error)) from error
    except OSError as error:
        raise DamagedError(f"{error.filename or source}: cannot be read: {error.strerror}") from error
    return slots


@torch.no_grad()
def _fill(path: Path, tensors: dict[str, tuple[torch.Tensor, safetensors.Slot]]) -> None:
    """Copy tensors out of one file, which is mapped: only the pages of this rank's part are read."""
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as mapped:
        for tensor, slot in tensors.values():
            if slot.end > slot.begin:
                _copy(
                    torch.frombuffer(mapped, dtype=torch.uint8, count=slot.end - slot.begin, offset=slot.begin),
                    slot,
                    tensor,
                )


def _copy(data: torch.Tensor, slot: safetensors.Slot, tensor: torch.Tensor) -> None:
    dtype = getattr(torch, slot.dtype)
    if slot.begin % dtype.itemsize:  # other writers do not align
        data = data.clone()
    whole = data.view(dtype).view(slot.shape)
    if not isinstance(tensor, DTensor):
        tensor.copy_(whole)
        return
    local = tensor.to_local()
    if all(type(placement) in {Shard, Replicate} for placement in tensor.placements):
        sizes, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
        local.copy_(whole[tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))])
    else:  # sharded twice along one dimension: torch knows how
        placed = distribute_tensor(whole.to(local.device), tensor.device_mesh, tensor.placements, src_data_rank=None)
        local.copy_(placed.to_local())
