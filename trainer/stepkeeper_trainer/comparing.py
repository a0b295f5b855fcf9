"""Hashes of tensors where they are: what only has to be compared with other ranks' copies need not be staged.

In the host's memory that reads once, where a copy reads and writes.  On a GPU the device hashes, beside what it is
given next, and one number a row comes to the host.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
import xxhash

from stepkeeper_trainer.buffers import view_bytes

if TYPE_CHECKING:
    from collections.abc import Collection, Container, Iterator, Mapping

IN_PLACE_BYTES = 64 * 1024  # smaller ones are staged: to look at each by itself takes longer than to copy it
ROW = 1024  # numbers of 8 bytes, whose hash is one: what cancels out within a row is not seen
BLOCK_BYTES = 8 * ROW * 8192  # whole rows of any width: copied at once


class Hash(NamedTuple):
    """What a tensor hashes to; comparable with one made the same way."""

    value: bytes  # 8
    by: Literal["bytes", "rows"]


class InPlace:
    """Tensors that are hashed where they are, at each save."""

    def __init__(self, names: Collection[str] = (), staged: Container[str] = ()) -> None:
        """Prepare; what is `staged` is hashed from there, but for what is on a GPU."""
        self.names = tuple(names)
        self._staged = staged
        self._found: dict[str, Hash] = {}
        self._rows: dict[str, torch.Tensor] = {}  # pinned; filled by the device

    def look(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Hash what is in the host's memory.  `tensors` are those that this rank holds."""
        self._found = {}
        for name in self.names:
            if name not in self._staged and not tensors[name].is_cuda:
                self._found[name] = hash_tensor(tensors[name])

    def issue(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Have the GPU hash what it has of these, on the current stream; `of` knows them once that is done."""
        for name, tensor in tensors.items():
            if tensor.is_cuda:
                rows = hash_rows(tensor)
                if name not in self._rows:
                    self._rows[name] = torch.empty_like(rows, device="cpu", pin_memory=True)
                self._rows[name].copy_(rows, non_blocking=True)

    def of(self, name: str) -> Hash | None:
        """Return a tensor's hash, if it was hashed where it is."""
        rows = self._rows.get(name)
        if rows is not None:
            return Hash(hash_tensor(rows).value, "rows")
        return self._found.get(name)


def hash_bytes(data: memoryview | object) -> Hash:
    """Return the hash of bytes."""
    return Hash(xxhash.xxh3_64_digest(data), "bytes")  # type: ignore[arg-type]  # whatever has a buffer


def hash_tensor(tensor: torch.Tensor) -> Hash:
    """Return the hash of a tensor in the host's memory."""
    flat = _bytes(tensor)  # is kept while its bytes are read: it may be a copy
    return hash_bytes(view_bytes(flat))


def hash_rows(tensor: torch.Tensor) -> torch.Tensor:
    """Return one number for each row of `ROW`, and one for the rest, as int64 on the tensor's device.

    The rows are of its bytes, whatever its type and wherever it begins, by `torch.hash_tensor`.
    """
    flat = _bytes(tensor)
    wide = next(dtype for dtype in (torch.int64, torch.int32, torch.uint8) if flat.numel() % dtype.itemsize == 0)
    row = ROW * wide.itemsize
    whole = flat.numel() // row * row
    parts = [torch.hash_tensor(each.view(-1, ROW), dim=1) for each in _widened(flat[:whole], wide)]
    parts += [torch.hash_tensor(each).view(1) for each in _widened(flat[whole:], wide)]
    return torch.cat([flat.new_empty(0, dtype=torch.int64), *(part.view(torch.int64) for part in parts)])


def _widened(flat: torch.Tensor, wide: torch.dtype) -> Iterator[torch.Tensor]:
    """Yield bytes as wider numbers.  Where they begin between two of those, as in a flat buffer, by copied blocks."""
    if not flat.numel():
        return
    if flat.storage_offset() % wide.itemsize == 0:
        yield flat.view(wide)
        return
    for block in torch.split(flat, BLOCK_BYTES):
        yield block.clone().view(wide)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a dense tensor in the order of its elements; a copy only where they lie otherwise."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)
