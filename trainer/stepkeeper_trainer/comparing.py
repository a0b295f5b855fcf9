"""Hashes of tensors where they are: what only has to be compared with other ranks' copies need not be staged.

In the host's memory that reads once, where a copy reads and writes.  On a GPU the device hashes, beside what it is
given next, and one number a row comes to the host.
"""

from __future__ import annotations

import hashlib
from functools import cache
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
import xxhash

from stepkeeper_trainer.buffers import view_bytes

if TYPE_CHECKING:
    from collections.abc import Collection, Container, Mapping

IN_PLACE_BYTES = 64 * 1024  # smaller ones are staged: to look at each by itself takes longer than to copy it
ROW = 1024  # words of 8 bytes, of which one number comes to the host
WORD_BYTES = 8
ROW_BYTES = ROW * WORD_BYTES
BLOCK_BYTES = 4096 * ROW_BYTES  # looked at together: the device needs a few times as much meanwhile


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
    """Return one number for each row of `ROW` words of 8 bytes, and one for the rest, as int64 on the tensor's device.

    A word counts by its place: each is multiplied with two numbers of that place, once whole and once its upper half,
    and the products are added up.  Rows that differ anywhere have one number with a probability below 2**-32.
    """
    flat = _bytes(tensor)
    whole = flat.numel() // ROW_BYTES * ROW_BYTES
    rows = [_sums(_words(block).view(-1, ROW)) for block in torch.split(flat[:whole], BLOCK_BYTES) if block.numel()]
    if rest := flat.numel() - whole:
        padded = flat.new_zeros(-(-rest // WORD_BYTES) * WORD_BYTES)
        padded[:rest] = flat[whole:]
        rows.append(_sums(padded.view(torch.int64).view(1, -1)))
    return torch.cat([flat.new_empty(0, dtype=torch.int64), *rows])


def _sums(rows: torch.Tensor) -> torch.Tensor:
    whole, upper = _multipliers(rows.device)
    width = rows.shape[1]
    return (rows * whole[:width]).sum(dim=1) + ((rows >> 32) * upper[:width]).sum(dim=1)


@cache
def _multipliers(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return two numbers for each place in a row: the same on all ranks."""
    digests = (hashlib.blake2b(number.to_bytes(4, "little"), digest_size=8).digest() for number in range(2 * ROW))
    both = torch.tensor([int.from_bytes(each, "little", signed=True) for each in digests], device=device)
    return both[:ROW], both[ROW:]


def _words(flat: torch.Tensor) -> torch.Tensor:
    """Return bytes as words, wherever they begin: a view of a flat buffer may begin within a word."""
    return (flat if flat.storage_offset() % WORD_BYTES == 0 else flat.clone()).view(torch.int64)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a dense tensor in the order of its elements; a copy only where they lie otherwise."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)
