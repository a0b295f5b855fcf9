"""From checked bytes to a tensor: as they are where that is possible, else by torch."""

from __future__ import annotations

import ctypes
import io
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from stepkeeper_trainer.errors import DamagedError

if TYPE_CHECKING:
    from stepkeeper_trainer.formats.items import Layout
    from stepkeeper_trainer.loading.wanted import Wanted


def copy_bytes(address: int, view: memoryview, count: int, target: torch.Tensor) -> None:
    """Copy bytes to a contiguous tensor of so many bytes."""
    assert len(view) >= count == target.numel() * target.itemsize, "a run fits its place"
    if target.device.type == "cpu":
        ctypes.memmove(target.data_ptr(), address, count)  # without the interpreter lock, and on this thread alone
    else:
        target.view(-1).view(torch.uint8).copy_(torch.frombuffer(view, dtype=torch.uint8, count=count))


def strided(data: bytearray, layout: Layout, item: Wanted) -> torch.Tensor:
    """Return the stored piece over its data, whatever its strides."""
    count = len(data) // item.dtype.itemsize
    try:
        return torch.frombuffer(data, dtype=item.dtype, count=count).as_strided(
            layout.size, layout.stride, layout.offset
        )
    except RuntimeError as error:
        raise DamagedError(f"{item.file}: {item.name} is larger than its data") from error


def load_plain(archive: memoryview | bytearray, item: Wanted, path: Path) -> torch.Tensor:
    """Let torch read an archive of an unusual kind, without running anything of it."""
    try:
        found = torch.load(io.BytesIO(archive), map_location="cpu", weights_only=True)
    except Exception as error:  # whatever torch raises for it
        raise DamagedError(f"{path}: {item.name} cannot be read as a tensor: {error}") from error
    if not isinstance(found, torch.Tensor) or tuple(found.shape) != item.sizes:
        raise DamagedError(f"{path}: {item.name} is not the tensor that `.metadata` says")
    return found.detach()


def copy_box(source: torch.Tensor, item: Wanted) -> None:
    """Copy the box that is wanted of a stored piece."""
    for dim, (offset, size) in enumerate(zip(item.box_offsets, item.box_sizes, strict=True)):
        source = source.narrow(dim, offset, size)
    with torch.no_grad():
        item.target.copy_(source)
