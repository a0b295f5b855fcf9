"""The tensors of a step directory as bytes: no torch, nothing executed, no byte used unchecked.

A piece of a tensor is a small archive that `torch.save` made (`items`), inside a `.distcp` file.  A whole tensor is put
together from the pieces that several ranks wrote, block by block, in bounded memory.
"""

from __future__ import annotations

import math
import os
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

import xxhash

from stepkeeper_trainer.formats import safetensors
from stepkeeper_trainer.formats.items import HEAD_BYTES, ItemError, contiguous, read_head
from stepkeeper_trainer.formats.manifest import FileEntry, Manifest
from stepkeeper_trainer.formats.metadata import Piece, TensorEntry
from stepkeeper_trainer.formats.plain import open_descriptor

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Self

    from stepkeeper_trainer.formats.metadata import Piece


CHUNKS_KEPT = 6  # of 16 MiB


class StoredError(Exception):
    """The bytes are damaged, or hold what no tensor of a checkpoint holds."""


class StepBytes:
    """Reads ranges of the files of a step directory; each chunk is compared with the manifest before it is used."""

    def __init__(self, directory: Path, manifest: Manifest, *, chunks_kept: int = CHUNKS_KEPT) -> None:
        self._directory, self._manifest = directory, manifest
        self.chunks_kept = chunks_kept
        self._descriptors: dict[str, int] = {}
        self._chunks: OrderedDict[tuple[str, int], bytes] = OrderedDict()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _at: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the files and forget the chunks."""
        self._chunks.clear()
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])

    @property
    def sizes(self) -> dict[str, int]:
        """How many bytes each file has."""
        return {name: entry.bytes for name, entry in self._manifest.files.items()}

    def read_whole(self, name: str) -> bytes:
        """Return a file.  Raises StoredError or OSError, as `read_into`."""
        return self.read(name, 0, self._entry(name).bytes)

    def read(self, name: str, start: int, length: int) -> bytes:
        """Return a range of a file.  Raises StoredError or OSError, as `read_into`."""
        self._check_range(name, start, length)
        data = bytearray(length)
        self.read_into(name, start, memoryview(data))
        return bytes(data)

    def read_into(self, name: str, start: int, view: memoryview) -> None:
        """Fill `view` from byte `start` of a file.

        Raises:
            StoredError: a chunk is not what the manifest says, or the range is outside.
            OSError: it cannot be read.
        """
        entry = self._check_range(name, start, len(view))
        self._descriptor(name, entry)  # of the right size, and with its chunks
        done = 0
        while done < len(view):
            index, within = divmod(start + done, entry.chunk_bytes)
            piece = memoryview(self._chunk(name, entry, index))[within : within + len(view) - done]
            view[done : done + len(piece)] = piece
            done += len(piece)

    def _entry(self, name: str) -> FileEntry:
        entry = self._manifest.files.get(name)
        if entry is None:
            raise StoredError(f"{self._directory / name}: not in the manifest")
        return entry

    def _check_range(self, name: str, start: int, length: int) -> FileEntry:
        entry = self._entry(name)
        if start < 0 or length < 0 or start + length > entry.bytes:
            raise StoredError(f"{self._directory / name}: has {entry.bytes} bytes, {start + length} are needed")
        return entry

    def _chunk(self, name: str, entry: FileEntry, index: int) -> bytes:
        key = (name, index)
        if key in self._chunks:
            self._chunks.move_to_end(key)
            return self._chunks[key]
        start = index * entry.chunk_bytes
        data = os.pread(self._descriptor(name, entry), min(entry.chunk_bytes, entry.bytes - start), start)
        self._compare(name, entry, index, data)
        while len(self._chunks) >= self.chunks_kept:
            self._chunks.popitem(last=False)
        self._chunks[key] = data
        return data

    def _compare(self, name: str, entry: FileEntry, index: int, data: bytes) -> None:
        if xxhash.xxh3_128_hexdigest(data) != entry.chunks[index]:
            start = index * entry.chunk_bytes
            raise StoredError(f"{self._directory / name}: bytes of chunk {index} (from byte {start}) are wrong")

    def _descriptor(self, name: str, entry: FileEntry) -> int:
        if name not in self._descriptors:
            path = self._directory / name
            descriptor = open_descriptor(path, within=self._directory)
            self._descriptors[name] = descriptor
            size = os.fstat(descriptor).st_size
            self._compare_size(path, entry, size)
        return self._descriptors[name]

    def _compare_size(self, path: Path, entry: FileEntry, size: int) -> None:
        if size != entry.bytes or not entry.lists_chunks:
            raise StoredError(
                f"{path}: has {size} bytes, the manifest says {entry.bytes} in {len(entry.chunks)} chunks"
            )


class PlainBytes(StepBytes):
    """The same of a DCP directory without a manifest, which has no digests: its caller has verified it before."""

    def __init__(self, directory: Path) -> None:
        """List the files.  Raises OSError."""
        with os.scandir(directory) as entries:
            sizes = {each.name: each.stat().st_size for each in entries if each.is_file(follow_symlinks=False)}
        files = {name: FileEntry(bytes=size, xxh3_128="") for name, size in sizes.items()}
        manifest = Manifest(step=0, tokens=0, world_size=0, created_at="", save_id="", files=files)
        super().__init__(directory, manifest)

    def _compare(self, name: str, entry: FileEntry, index: int, data: bytes) -> None:
        if len(data) != min(entry.chunk_bytes, entry.bytes - index * entry.chunk_bytes):
            raise StoredError(f"{self._directory / name}: is shorter than it was")

    def _compare_size(self, path: Path, entry: FileEntry, size: int) -> None:
        if size != entry.bytes:
            raise StoredError(f"{path}: has {size} bytes, and had {entry.bytes} just now: somebody writes it")


# Numbers in the order of their indices ------------------------------------------------------------------------------


def gather(data: memoryview, sizes: tuple[int, ...], strides: tuple[int, ...], item_bytes: int) -> bytes:
    """Return numbers in the order of their indices, from memory where they have other strides (a transposed tensor).

    >>> gather(memoryview(bytes([1, 2, 3, 4, 5, 6])), (3, 2), (1, 3), 1).hex()
    '010402050306'
    """
    width = min(item_bytes, 8)
    if item_bytes > width:  # a complex number is two
        parts = item_bytes // width
        sizes, strides = (*sizes, parts), (*(stride * parts for stride in strides), 1)
    if not sizes:
        return data[:item_bytes].tobytes()
    numbers = _cast(data[: len(data) // width * width], width)
    *outer, count = sizes
    step = strides[-1]
    rows = []
    for index in product(*map(range, outer)):
        at = sum(map(int.__mul__, index, strides))
        row = (
            numbers[at : at + (count - 1) * step + 1 : step]
            if step
            else memoryview(bytes(numbers[at : at + 1]) * count)
        )
        rows.append(row.tobytes())
    return b"".join(rows)


def _cast(data: memoryview, width: int) -> memoryview:
    match width:
        case 8:
            return data.cast("Q")
        case 4:
            return data.cast("I")
        case 2:
            return data.cast("H")
        case _:
            return data.cast("B")


BLOCK_BYTES = 32 * 1024 * 1024  # of a tensor, in memory at once
CHUNKS_KEPT_MAX = 32


@dataclass(frozen=True, slots=True)
class _Part:
    """A piece whose numbers are read a range at a time, in the order of their indices."""

    source: StepBytes
    file: str
    start: int  # byte of the first number
    whole: bytes | None  # of one that lies otherwise in memory (transposed): turned around once

    def read_into(self, start: int, view: memoryview) -> None:
        """Fill `view` from byte `start` of the piece."""
        if self.whole is None:
            self.source.read_into(self.file, self.start + start, view)
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
                part = parts.get(piece) or parts.setdefault(piece, _part(source, piece, entry.dtype))
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


def _part(source: StepBytes, piece: Piece, dtype: str) -> _Part:
    """Find the numbers of a piece.

    Raises:
        StoredError: its archive is damaged, compressed, or of another tensor than `.metadata` says.
        OSError: it cannot be read.
    """
    extent, item_bytes = piece.extent, safetensors.ITEM_BYTES[dtype]
    if extent is None or extent.transformed:
        raise StoredError("stored nowhere" if extent is None else f"{extent.file}: compressed: no reader for it")
    where = f"{extent.file} at byte {extent.start}"
    try:
        layout = read_head(source.read(extent.file, extent.start, min(HEAD_BYTES, extent.length)))
    except ItemError as error:
        raise StoredError(f"{where}: no tensor: {error}") from error
    sizes, strides = layout.size, layout.stride
    if (layout.dtype, sizes) != (dtype, piece.sizes):
        found = f"{layout.dtype} of shape {list(sizes)}"
        raise StoredError(f"{where}: is {found}, `.metadata` says {dtype} of shape {list(piece.sizes)}")
    start = extent.start + layout.head_bytes + layout.offset * item_bytes
    size = layout.storage_bytes - layout.offset * item_bytes
    needed = (1 + sum((s - 1) * t for s, t in zip(sizes, strides, strict=True))) * item_bytes if math.prod(sizes) else 0
    if needed > size or layout.head_bytes + layout.storage_bytes > extent.length:
        raise StoredError(f"{where}: its bytes are too few for its shape")
    if contiguous(sizes, strides):
        return _Part(source, extent.file, start, None)
    data = memoryview(source.read(extent.file, start, size))
    return _Part(source, extent.file, start, gather(data, sizes, strides, item_bytes))
