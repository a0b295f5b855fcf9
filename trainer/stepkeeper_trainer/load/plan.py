"""What is wanted, as tasks: a chunk of a file each, with what is to be copied out of it.

What a load is asked for: boxes of stored tensors, and where they go.

The files of a step directory as a load reads them: by place, a chunk at a time, checked.
"""

from __future__ import annotations

import math
import os
import sys
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import xxhash

from stepkeeper_trainer.errors import DamagedError
from stepkeeper_trainer.formats.items import HEAD_BYTES, ItemError, Layout
from stepkeeper_trainer.formats.plain import open_descriptor

if TYPE_CHECKING:
    from collections.abc import Iterator

    from typing_extensions import Self

    from stepkeeper_trainer.formats.manifest import FileEntry, Manifest
    from stepkeeper_trainer.load.worker import Layouts


PIECE_BYTES = 512 * 1024  # read and hashed at once


class Source:
    """A file of the step directory, read by place."""

    def __init__(self, directory: Path, file: str, entry: FileEntry) -> None:
        """Open it.  Raises DamagedError where it cannot be what the manifest says."""
        path = directory / file
        self.path, self.entry, self.name = path, entry, ""
        if not entry.chunk_bytes or len(entry.chunks) != -(-entry.bytes // entry.chunk_bytes):
            raise DamagedError(f"{path}: the manifest does not list its chunks")
        try:
            self._descriptor = open_descriptor(path, within=directory)
        except OSError as error:
            raise DamagedError(f"{path}: cannot be opened: {error.strerror}") from error
        size = os.fstat(self._descriptor).st_size
        if size != entry.bytes:
            self.close()
            raise DamagedError(f"{path}: has {size} bytes, the manifest says {entry.bytes}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)

    def peek(self, at: int, count: int) -> bytes:
        """Read bytes unchecked: the caller compares them with the checked ones."""
        try:
            return os.pread(self._descriptor, count, at)
        except OSError as error:
            raise DamagedError(f"{self.path}: cannot be read at byte {at}: {error.strerror}") from error

    def read_chunk(self, index: int, view: memoryview) -> None:
        """Fill `view` with a chunk.

        Raises:
            DamagedError: it is not what the manifest says, or cannot be read.
        """
        start, done = index * self.entry.chunk_bytes, 0
        digest = xxhash.xxh3_128()
        while done < len(view):
            piece = view[done : done + PIECE_BYTES]
            try:
                count = os.preadv(self._descriptor, [piece], start + done)
            except OSError as error:
                raise DamagedError(f"{self.path}: cannot be read at byte {start + done}: {error.strerror}") from error
            if not count:
                raise DamagedError(f"{self.path}: ends at byte {start + done} of {self.entry.bytes}")
            digest.update(piece[:count])
            done += count
        if digest.hexdigest() != self.entry.chunks[index]:
            raise DamagedError(f"{self.path}: bytes of chunk {index} (from byte {start}) are wrong")


def open_source(directory: Path, manifest: Manifest, file: str) -> Source:
    """Open a file of a step directory.  Raises DamagedError."""
    entry = manifest.files.get(file)
    if entry is None:
        raise DamagedError(f"{directory / file}: not in the manifest")
    return Source(directory, file, entry)


def by_chunk(start: int, end: int, chunk_bytes: int) -> Iterator[tuple[int, int, int]]:
    """Cut a range of bytes at the borders of chunks: index, begin, end."""
    while start < end:
        index = start // chunk_bytes
        stop = min(end, (index + 1) * chunk_bytes)
        yield index, start, stop
        start = stop


@dataclass(slots=True)
class Run:
    """Bytes of a file that go, as they are, to a place in memory."""

    start: int
    length: int
    target: torch.Tensor  # contiguous, of the stored type


@dataclass(slots=True)
class ChunkTask:
    """One chunk of one file, and what is wanted of it."""

    file: str
    index: int
    runs: list[Run] = field(default_factory=list)
    inside: list[Wanted] = field(default_factory=list)  # archives that lie in it as a whole
    heads: list[tuple[int, bytes]] = field(default_factory=list)  # bytes that were read unchecked: place and content


@dataclass(slots=True)
class RowsTask:
    """An archive over several chunks, of which rows are wanted, or parts of rows."""

    item: Wanted
    head: bytes
    layout: Layout


@dataclass(slots=True)
class WholeTask:
    """An archive of an unusual kind, read as a whole."""

    item: Wanted


Task = ChunkTask | RowsTask | WholeTask


def plan(directory: Path, manifest: Manifest, wanted: list[Wanted], layouts: Layouts) -> Iterator[Task]:
    """Turn what is wanted into tasks, in the order of the files.

    Raises:
        DamagedError: what is wanted cannot lie where `.metadata` says.
    """
    by_file: dict[str, list[Wanted]] = defaultdict(list)
    for item in wanted:
        by_file[item.file].append(item)
    for file, items in by_file.items():
        chunks: dict[int, ChunkTask] = {}
        others: list[Task] = []
        with open_source(directory, manifest, file) as source:
            for item in items:
                if item.start < 0 or item.length <= 0 or item.end > source.entry.bytes:
                    raise DamagedError(f"{source.path}: {item.name} lies outside of it")
                others += _plan_item(item, source, chunks, layouts)
        yield from (chunks[index] for index in sorted(chunks))
        yield from others


def _plan_item(item: Wanted, source: Source, chunks: dict[int, ChunkTask], layouts: Layouts) -> list[Task]:
    size = source.entry.chunk_bytes
    first, last = item.start // size, (item.end - 1) // size

    def chunk(index: int) -> ChunkTask:
        return chunks.setdefault(index, ChunkTask(item.file, index))

    if first == last:
        chunk(first).inside.append(item)
        return []
    head = source.peek(item.start, min(HEAD_BYTES, item.length))
    try:
        layout = layouts.of(item, head)
    except ItemError:
        return [WholeTask(item)]
    if not layout.contiguous:
        return [WholeTask(item)]
    head = head[: layout.head_bytes]
    run = item.run()
    if run is None or not item.takes_bytes():
        return [RowsTask(item, head, layout)]
    for index, begin, end in by_chunk(item.start, item.start + len(head), size):
        chunk(index).heads.append((begin, head[begin - item.start : end - item.start]))
    at = item.start + layout.head_bytes + run[0]
    flat = item.target.view(-1)
    for index, begin, end in by_chunk(at, at + run[1], size):
        # a number may lie over two chunks: bytes, and not numbers, are copied
        piece = flat.view(torch.uint8)[begin - at : end - at]
        chunk(index).runs.append(Run(begin, end - begin, piece))
    return []


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """A box of a stored piece of a tensor, and where it is to go."""

    name: str
    file: str
    start: int  # of the archive in the file
    length: int
    sizes: tuple[int, ...]  # of the stored piece
    dtype: torch.dtype  # of the stored piece
    box_offsets: tuple[int, ...]  # within the stored piece
    box_sizes: tuple[int, ...]
    target: torch.Tensor  # of `box_sizes`, and perhaps of another type or device

    @property
    def end(self) -> int:
        """Where the archive ends in the file."""
        return self.start + self.length

    def run(self) -> tuple[int, int] | None:
        """Return the bytes of the box in the data, row by row, if they are in a row; first byte and count."""
        full = len(self.sizes)
        while full and self.box_sizes[full - 1] == self.sizes[full - 1]:
            full -= 1
        if any(size != 1 for size in self.box_sizes[: max(0, full - 1)]):
            return None
        first = 0
        for offset, size in zip(self.box_offsets, self.sizes, strict=True):
            first = first * size + offset
        return first * self.dtype.itemsize, math.prod(self.box_sizes) * self.dtype.itemsize

    def takes_bytes(self) -> bool:
        """Whether stored bytes can go to the target as they are."""
        target = self.target
        return target.dtype == self.dtype and target.is_contiguous() and sys.byteorder == "little"
