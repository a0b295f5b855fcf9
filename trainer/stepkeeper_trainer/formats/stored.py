"""The numbers of a tensor as they lie in a step directory: no torch, nothing executed, no byte used unchecked.

A piece of a tensor is a small zip archive that `torch.save` made, inside a `.distcp` file.  Its data lie there as
they are in memory; `data.pkl` beside them says of what shape.  That one is read by a machine with a stack and
tuples, that cannot call anything.

A whole tensor from the pieces that several ranks wrote, block by block, in bounded memory.  Needs no torch.
"""

from __future__ import annotations

import functools
import io
import math
import os
import pickletools
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from stepkeeper_trainer.formats import safetensors
from stepkeeper_trainer.formats.manifest import FileEntry, Manifest
from stepkeeper_trainer.formats.metadata import Piece, TensorEntry
from stepkeeper_trainer.formats.plain import open_descriptor

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Self

    from stepkeeper_trainer.formats.metadata import Extent, Piece


CHUNKS_KEPT = 6  # of 16 MiB: one file read front to back needs one, and its archive's end another
PICKLE_BYTES_MAX = 64 * 1024
_LOCAL_HEADER = struct.Struct("<4s22xHH")
_TAIL_BYTES = 2048  # of an archive: its directory, mostly


class StoredError(Exception):
    """The bytes are damaged, or hold what no tensor of a checkpoint holds."""


class StepBytes:
    """Reads ranges of the files of a step directory; each chunk is compared with the manifest before it is used."""

    def __init__(self, directory: Path, manifest: Manifest, *, chunks_kept: int = CHUNKS_KEPT) -> None:
        """Open nothing yet."""
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

    def read(self, name: str, start: int, length: int) -> bytes:
        """Return a range of a file.  Raises StoredError or OSError, as `read_into`."""
        data = bytearray(length)
        self.read_into(name, start, memoryview(data))
        return bytes(data)

    def read_into(self, name: str, start: int, view: memoryview) -> None:
        """Fill `view` from byte `start` of a file.

        Raises:
            StoredError: a chunk is not what the manifest says, or the range is outside.
            OSError: it cannot be read.
        """
        entry = self._manifest.files.get(name)
        if entry is None:
            raise StoredError(f"{self._directory / name}: not in the manifest")
        if start < 0 or start + len(view) > entry.bytes:
            raise StoredError(f"{self._directory / name}: has {entry.bytes} bytes, {start + len(view)} are needed")
        done = 0
        while done < len(view):
            index, within = divmod(start + done, entry.chunk_bytes)
            piece = memoryview(self._chunk(name, entry, index))[within : within + len(view) - done]
            view[done : done + len(piece)] = piece
            done += len(piece)

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
        if index >= len(entry.chunks) or xxhash.xxh3_128_hexdigest(data) != entry.chunks[index]:
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
        count = -(-entry.bytes // entry.chunk_bytes) if entry.chunk_bytes > 0 else -1
        if size != entry.bytes or len(entry.chunks) != count:
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
        self.sizes = sizes

    def _compare(self, name: str, entry: FileEntry, index: int, data: bytes) -> None:
        if len(data) != min(entry.chunk_bytes, entry.bytes - index * entry.chunk_bytes):
            raise StoredError(f"{self._directory / name}: is shorter than it was")

    def _compare_size(self, path: Path, entry: FileEntry, size: int) -> None:
        if size != entry.bytes:
            raise StoredError(f"{path}: has {size} bytes, and had {entry.bytes} just now: somebody writes it")


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the numbers of a piece are, and in which order."""

    file: str
    start: int  # byte of the first number
    bytes: int  # from there to the end of the archive's data
    strides: tuple[int, ...]  # in numbers


def locate(source: StepBytes, piece: Piece, item_bytes: int) -> Layout:
    """Find the numbers of a piece.

    Raises:
        StoredError: its archive is damaged, compressed, or of another shape than `.metadata` says.
        OSError: it cannot be read.
    """
    extent = piece.extent
    if extent is None or extent.transformed:
        raise StoredError("stored nowhere" if extent is None else f"{extent.file}: compressed: no reader for it")
    where = f"{extent.file} at byte {extent.start}"
    try:
        with zipfile.ZipFile(_Window(source, extent)) as archive:
            entries = {entry.filename.partition("/")[2]: entry for entry in archive.infolist()}
            if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries.values()):
                raise StoredError(f"{where}: its archive is compressed")
            data, header = entries["data/0"], entries["data.pkl"]
            if "data/1" in entries or header.file_size > PICKLE_BYTES_MAX:
                raise StoredError(f"{where}: holds more than one tensor")
            if "byteorder" in entries and archive.read(entries["byteorder"]) != b"little":
                raise StoredError(f"{where}: of another byte order")
            offset, sizes, strides = _shape(archive.read(header))
    except (zipfile.BadZipFile, KeyError, EOFError, NotImplementedError, RuntimeError) as error:
        raise StoredError(f"{where}: no tensor: {error}") from error
    if sizes != piece.sizes:
        raise StoredError(f"{where}: of shape {list(sizes)}, `.metadata` says {list(piece.sizes)}")
    begin = _data_begins(source, extent, data.header_offset, where) + offset * item_bytes
    last = offset + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
    if math.prod(sizes) and ((last + 1) * item_bytes > data.file_size or min(strides, default=0) < 0 or offset < 0):
        raise StoredError(f"{where}: {data.file_size} bytes are too few for its shape")
    return Layout(extent.file, begin, data.file_size - offset * item_bytes, strides)


def _data_begins(source: StepBytes, extent: Extent, header_offset: int, where: str) -> int:
    at = extent.start + header_offset
    magic, name_bytes, extra_bytes = _LOCAL_HEADER.unpack(source.read(extent.file, at, _LOCAL_HEADER.size))
    if magic != b"PK\x03\x04":
        raise StoredError(f"{where}: no tensor: its data are not where its directory says")
    return int(at + _LOCAL_HEADER.size + name_bytes + extra_bytes)


class _Window(io.RawIOBase):
    """The bytes of an extent as a file, for `zipfile`."""

    def __init__(self, source: StepBytes, extent: Extent) -> None:
        super().__init__()
        self._source, self._extent, self._at = source, extent, 0
        self.name = extent.file
        self._tail_from = max(0, extent.length - _TAIL_BYTES)
        self._tail = source.read(extent.file, extent.start + self._tail_from, extent.length - self._tail_from)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._extent.length}[whence]
        self._at = base + offset
        if self._at < 0:
            raise zipfile.BadZipFile("leads outside")
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, size: int | None = -1, /) -> bytes:
        left = max(0, self._extent.length - self._at)
        count = left if size is None or size < 0 else min(size, left)
        begin = self._at - self._tail_from
        if begin >= 0:
            data = self._tail[begin : begin + count]
        else:
            data = self._source.read(self._extent.file, self._extent.start + self._at, count)
        self._at += count
        return data


# What `data.pkl` says, without running it ---------------------------------------------------------------------------

_MARK = object()
_REBUILD = frozenset({"torch._utils _rebuild_tensor_v2", "torch._utils _rebuild_tensor_v3"})
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": (), "EMPTY_DICT": None}
_VALUES = frozenset({"BINUNICODE", "SHORT_BINUNICODE", "BININT", "BININT1", "BININT2", "LONG1", "GLOBAL"})


@functools.lru_cache(maxsize=4096)
def _shape(data: bytes) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    """Return offset, sizes and strides of the tensor that a `data.pkl` describes."""
    try:
        rebuild, arguments = _reduce(data)
        _storage, offset, sizes, strides = arguments[:4]
    except (ValueError, IndexError, TypeError, KeyError, AttributeError, StopIteration) as error:
        raise StoredError(f"data.pkl describes no tensor: {error}") from error
    numbers = (offset, *sizes, *strides) if isinstance(sizes, tuple) and isinstance(strides, tuple) else ()
    if rebuild not in _REBUILD or not numbers or len(sizes) != len(strides):
        raise StoredError(f"data.pkl describes no plain tensor, but {str(rebuild)[:80]!r}")
    if any(type(number) is not int or number < 0 for number in numbers):
        raise StoredError("data.pkl describes a tensor of no shape")
    return offset, sizes, strides


def _reduce(data: bytes) -> tuple[Any, Any]:
    """Run the few opcodes that describe a tensor; a call is left as the pair of its name and arguments."""
    stack: list[Any] = []
    memo: dict[Any, Any] = {}
    for opcode, argument, _ in pickletools.genops(data):
        name = opcode.name
        if name == "STOP":
            function, arguments = stack.pop()
            return function, arguments
        if name in _VALUES:
            stack.append(argument)
        elif name in _CONSTANTS:
            stack.append(_CONSTANTS[name])
        elif name in {"BINPUT", "LONG_BINPUT"}:
            memo[argument] = stack[-1]
        elif name in {"BINGET", "LONG_BINGET"}:
            stack.append(memo[argument])
        elif name not in {"PROTO", "FRAME"}:
            _fold(stack, name)
    raise ValueError("it does not end")


def _fold(stack: list[Any], name: str) -> None:
    """Carry out an opcode that makes one value of those on the stack."""
    match name:
        case "MARK":
            stack.append(_MARK)
        case "TUPLE":
            at = len(stack) - 1 - next(back for back, value in enumerate(reversed(stack)) if value is _MARK)
            stack[at:] = [tuple(stack[at + 1 :])]
        case "TUPLE1" | "TUPLE2" | "TUPLE3":
            at = len(stack) - int(name[-1])
            stack[at:] = [tuple(stack[at:])]
        case "BINPERSID":
            stack[-1] = ("storage", stack[-1])
        case "REDUCE":
            stack[-2:] = [(stack[-2], stack[-1])]
        case _:
            raise ValueError(f"{name} is not needed for one")


# Numbers in the order of their indices -------------------------------------------------------------------------------


def contiguous(sizes: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether numbers of these strides lie one after the other in the order of their indices."""
    expected = 1
    for size, stride in zip(reversed(sizes), reversed(strides), strict=True):
        if size != 1 and stride != expected:
            return math.prod(sizes) == 0
        expected *= size
    return True


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
