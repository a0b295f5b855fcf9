"""A whole tensor from the pieces that several ranks wrote, block by block, in bounded memory.  Needs no torch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from stepkeeper_trainer.formats import safetensors
from stepkeeper_trainer.formats.metadata import Piece, TensorEntry
from stepkeeper_trainer.formats.stored import CHUNKS_KEPT, Layout, StepBytes, contiguous, gather, locate

BLOCK_BYTES = 32 * 1024 * 1024  # of a tensor, in memory at once
CHUNKS_KEPT_MAX = 32


@dataclass(frozen=True, slots=True)
class _Part:
    """A piece whose numbers are read a range at a time, in the order of their indices."""

    source: StepBytes
    layout: Layout
    whole: bytes | None  # of one that lies otherwise in memory (transposed): turned around once

    def read_into(self, start: int, view: memoryview) -> None:
        """Fill `view` from byte `start` of the piece."""
        if self.whole is None:
            self.source.read_into(self.layout.file, self.layout.start + start, view)
        else:
            view[:] = self.whole[start : start + len(view)]


@dataclass(frozen=True, slots=True)
class _Block:
    """Some rows of a tensor, while they are put together."""

    data: memoryview
    shape: tuple[int, ...]
    item_bytes: int

    def place(self, part: _Part, start: int, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> None:
        """Lay what stands from byte `start` of a piece as a box of `sizes` at `offsets`."""
        shape = self.shape
        strides = [math.prod(shape[place + 1 :]) * self.item_bytes for place in range(len(shape))]
        first = sum(map(int.__mul__, offsets, strides))
        count = math.prod(sizes) * self.item_bytes
        if sizes[1:] == shape[1:]:  # whole rows: the usual case
            part.read_into(start, self.data[first : first + count])
            return
        box = bytearray(count)
        part.read_into(start, memoryview(box))
        cut = len(shape) - 1  # the last dimension of which the box holds a part only: behind it, runs are whole
        while sizes[cut] == shape[cut]:
            cut -= 1
        run = sizes[cut] * strides[cut]
        at = 0
        for index in product(*map(range, sizes[:cut])):
            begin = first + sum(map(int.__mul__, index, strides))
            self.data[begin : begin + run] = box[at : at + run]
            at += run


def tensor_blocks(source: StepBytes, entry: TensorEntry, *, block_bytes: int = BLOCK_BYTES) -> Iterator[bytearray]:
    """Yield the bytes of a tensor front to back, put together from its pieces.

    Raises:
        StoredError: a piece is damaged.
        OSError: a file cannot be read.
    """
    item_bytes = safetensors.ITEM_BYTES[entry.dtype]
    if not math.prod(entry.size):
        return
    files = {piece.extent.file for piece in entry.pieces if piece.extent is not None}
    source.chunks_kept = min(CHUNKS_KEPT_MAX, max(CHUNKS_KEPT, len(files) + 2))
    size = entry.size or (1,)  # a number is a row of one
    parts: dict[Piece, _Part] = {}
    depth, inner = _split_at(size, item_bytes, block_bytes)
    rows = max(1, block_bytes // inner)
    for prefix in product(*map(range, size[:depth])):
        for first in range(0, size[depth], rows):
            last = min(first + rows, size[depth])
            data = bytearray((last - first) * inner)
            block = _Block(memoryview(data), (last - first, *size[depth + 1 :]), item_bytes)
            for piece in entry.pieces:
                box = _Box(piece.offsets or (0,), piece.sizes or (1,))
                low, high = box.within(prefix, first, last)
                if low >= high:
                    continue
                part = parts.get(piece) or parts.setdefault(piece, _part(source, piece, item_bytes))
                start = box.row(prefix, low) * math.prod(box.sizes[depth + 1 :]) * item_bytes
                offsets = (low - first, *box.offsets[depth + 1 :])
                block.place(part, start, offsets, (high - low, *box.sizes[depth + 1 :]))
            yield data


@dataclass(frozen=True, slots=True)
class _Box:
    """Where a piece lies in its tensor."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    def within(self, prefix: tuple[int, ...], first: int, last: int) -> tuple[int, int]:
        """Return which rows `first` to `last`, below the fixed indices `prefix`, are in the piece."""
        for index, offset, size in zip(prefix, self.offsets, self.sizes, strict=False):
            if not offset <= index < offset + size:
                return 0, 0
        depth = len(prefix)
        low, high = max(first, self.offsets[depth]), min(last, self.offsets[depth] + self.sizes[depth])
        return (low, high) if math.prod(self.sizes) else (0, 0)

    def row(self, prefix: tuple[int, ...], low: int) -> int:
        """Return how many rows of the piece stand before row `low` below `prefix`."""
        row = 0
        for index, offset, size in zip((*prefix, low), self.offsets, self.sizes, strict=False):
            row = row * size + index - offset
        return row


def _split_at(size: tuple[int, ...], item_bytes: int, block_bytes: int) -> tuple[int, int]:
    """Return the dimension along which blocks are cut, and the bytes of one of its rows."""
    for depth in range(len(size)):
        inner = math.prod(size[depth + 1 :]) * item_bytes
        if inner <= block_bytes:
            return depth, inner
    return len(size) - 1, item_bytes


def _part(source: StepBytes, piece: Piece, item_bytes: int) -> _Part:
    layout = locate(source, piece, item_bytes)
    if contiguous(piece.sizes, layout.strides):
        return _Part(source, layout, None)
    data = memoryview(source.read(layout.file, layout.start, layout.bytes))
    return _Part(source, layout, gather(data, piece.sizes, layout.strides, item_bytes))
