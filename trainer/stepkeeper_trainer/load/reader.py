"""Reading a step directory: every chunk is checked against the manifest before a byte of it is used.

Also where only slices are read (another world size), and `.metadata` before it is parsed.  Nothing is
unpickled into code.
"""

from __future__ import annotations

import inspect
import io
import os
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import xxhash
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType

from stepkeeper_trainer.coordinate import groups
from stepkeeper_trainer.errors import DamagedError
from stepkeeper_trainer.formats.metadata import (
    METADATA_NAME,
    Contents,
    Extent,
    MetadataError,
    Piece,
    TensorEntry,
    parse,
)
from stepkeeper_trainer.formats.plain import collection_paused, open_descriptor
from stepkeeper_trainer.load import Limits, Wanted, fill

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch.distributed.checkpoint.planner import ReadItem

    from stepkeeper_trainer.formats.manifest import FileEntry, Manifest


ALONE: dict[str, Any] = {"no_dist": True} if "no_dist" in inspect.signature(state_dict_loader.load).parameters else {}
"""Has a load or save of DCP ask no other process.  That of torch 2.6 asks none where there is no process group."""
_CHUNKS_KEPT = 4  # a tensor's item is read at its end first, then from its start


class CheckedFile(io.RawIOBase):
    """A file that gives out checked bytes only."""

    def __init__(self, path: Path, entry: FileEntry) -> None:
        """Open it.  Raises OSError, or DamagedError where its size is wrong."""
        super().__init__()
        self._path, self._entry, self._at = path, entry, 0
        self._chunks: dict[int, bytes] = {}
        self._descriptor = open_descriptor(path, within=path.parent)
        size = os.fstat(self._descriptor).st_size
        count = -(-entry.bytes // entry.chunk_bytes) if entry.chunk_bytes > 0 else -1
        if size != entry.bytes or len(entry.chunks) != count:
            os.close(self._descriptor)
            raise DamagedError(
                f"{path}: has {size} bytes, the manifest says {entry.bytes} in {len(entry.chunks)} chunks"
            )

    def readable(self) -> bool:
        """Yes."""
        return True

    def seekable(self) -> bool:
        """Yes."""
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        """Move."""
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._entry.bytes}[whence]
        self._at = max(0, base + offset)
        return self._at

    def tell(self) -> int:
        """Say where the next read begins."""
        return self._at

    def readinto(self, buffer: Any) -> int:
        """Read checked bytes, up to the end of a chunk.

        Raises:
            DamagedError: the chunk is not what the manifest says.
            OSError: it cannot be read.
        """
        if self._at >= self._entry.bytes:
            return 0
        index, start = divmod(self._at, self._entry.chunk_bytes)
        view = memoryview(buffer).cast("B")
        piece = memoryview(self._chunk(index))[start : start + len(view)]
        view[: len(piece)] = piece
        self._at += len(piece)
        return len(piece)

    def close(self) -> None:
        """Close the file."""
        if not self.closed:
            os.close(self._descriptor)
        super().close()

    def _chunk(self, index: int) -> bytes:
        if index in self._chunks:
            return self._chunks[index]
        start = index * self._entry.chunk_bytes
        wanted = min(self._entry.chunk_bytes, self._entry.bytes - start)
        data = b""
        while len(data) < wanted:
            more = os.pread(self._descriptor, wanted - len(data), start + len(data))
            if not more:
                break
            data = data + more if data else more
        if xxhash.xxh3_128_hexdigest(data) != self._entry.chunks[index]:
            raise DamagedError(f"{self._path}: bytes of chunk {index} (from byte {start}) are wrong")
        while len(self._chunks) >= _CHUNKS_KEPT:
            del self._chunks[next(iter(self._chunks))]
        self._chunks[index] = data
        return data


class CheckedReader:
    """What a step directory holds, and its tensors."""

    def __init__(self, directory: Path, manifest: Manifest) -> None:
        self._directory, self._manifest = directory, manifest
        self._contents: Contents | None = None
        self._metadata: Metadata | None = None

    @property
    def contents(self) -> Contents:
        """What `.metadata` says, checked against the manifest and parsed as data.

        Raises:
            DamagedError: it is not what was saved.
            OSError: it cannot be opened.
        """
        if self._contents is None:
            path = self._directory / METADATA_NAME
            entry = self._manifest.files.get(METADATA_NAME)
            if entry is None:
                raise DamagedError(f"{path}: not in the manifest")
            with CheckedFile(path, entry) as raw, io.BufferedReader(raw, 1024 * 1024) as file:
                data = file.read()
            try:
                self._contents = parse(data)
            except MetadataError as error:
                raise DamagedError(f"{path}: {error}") from error
        return self._contents

    def read_metadata(self) -> Metadata:
        """Return what the step holds, in torch's words.  Raises as `contents`."""
        if self._metadata is None:
            self._metadata = describe(self.contents)
        return self._metadata

    def fill(self, tensors: dict[str, torch.Tensor], *, limits: Limits | None = None, turn: float = 0.0) -> int:
        """Fill `tensors` in place with what this rank holds of them; return how many bytes were read.

        Raises:
            DamagedError: some byte is not what the manifest says, or cannot be read.
        """
        with collection_paused():
            wanted = self._plan(tensors)
        return fill(self._directory, self._manifest, wanted, limits=limits, turn=turn)

    def _plan(self, tensors: dict[str, torch.Tensor]) -> list[Wanted]:
        """Say which boxes of which stored pieces this rank needs; torch's planner knows all kinds of sharding."""
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner(dict(tensors), self.read_metadata(), is_coordinator=True)
        try:
            plan = planner.create_local_plan()
        except (RuntimeError, ValueError) as error:  # torch's words for what is missing or of another size
            raise DamagedError(f"{self._directory}: {error}") from error
        for item in plan.items:
            if item.type is LoadItemType.BYTE_IO:
                raise DamagedError(f"{self._directory}: {item.storage_index.fqn} is a pickle, which is never loaded")
        return self.wanted((item, planner.resolve_tensor(item)) for item in plan.items)

    def wanted(self, items: Iterable[tuple[ReadItem, torch.Tensor]]) -> list[Wanted]:
        """Say where the bytes of a plan's tensors lie, each with the tensor that they go to.

        Raises:
            DamagedError: they are stored nowhere, or compressed.
        """
        items = list(items)
        names = {item.storage_index.fqn for item, _ in items}
        places = {
            (name, piece.offsets): (self.contents.tensors[name], piece)
            for name in names & self.contents.tensors.keys()
            for piece in self.contents.tensors[name].pieces
        }
        return [self._wanted(item, target, places) for item, target in items]

    def read_objects(self, names: Iterable[str]) -> Iterator[tuple[str, Extent, bytes]]:
        """Yield the checked bytes of values that are no tensors; nothing is unpickled.

        Raises:
            DamagedError: some byte is not what the manifest says, or cannot be read.
        """
        by_file: dict[str, list[tuple[Extent, str]]] = defaultdict(list)
        for name in names:
            extent = self.contents.objects.get(name)
            if extent is None:
                raise DamagedError(f"{self._directory}: {name} is stored nowhere")
            by_file[extent.file].append((extent, name))
        for file, extents in by_file.items():
            entry = self._manifest.files.get(file)
            if entry is None:
                raise DamagedError(f"{self._directory / file}: not in the manifest")
            try:
                with CheckedFile(self._directory / file, entry) as raw, io.BufferedReader(raw, 64 * 1024) as opened:
                    for extent, name in sorted(extents, key=lambda each: each[0].start):
                        opened.seek(extent.start)
                        data = opened.read(extent.length)
                        if extent.transformed or len(data) != extent.length:
                            raise DamagedError(f"{self._directory / file}: {name} is compressed, or lies outside of it")
                        yield name, extent, data
            except OSError as error:
                raise DamagedError(f"{self._directory / file}: cannot be read: {error.strerror}") from error

    def _wanted(
        self, item: ReadItem, target: torch.Tensor, places: dict[tuple[str, tuple[int, ...]], tuple[TensorEntry, Piece]]
    ) -> Wanted:
        name = item.storage_index.fqn
        tensor, piece = places[name, tuple(item.storage_index.offset or (0,) * len(item.lengths))]
        if piece.extent is None:
            raise DamagedError(f"{self._directory}: {name} at {list(piece.offsets)} is stored nowhere")
        if piece.extent.transformed:
            raise DamagedError(f"{self._directory}: {name} is stored compressed, which Stepkeeper does not write")
        return Wanted(
            name=name,
            file=piece.extent.file,
            start=piece.extent.start,
            length=piece.extent.length,
            sizes=piece.sizes,
            dtype=_dtype(name, tensor),
            box_offsets=tuple(item.storage_offsets),
            box_sizes=tuple(item.lengths),
            target=target.detach(),
        )


def describe(contents: Contents) -> Metadata:
    """Return what a directory holds, in torch's words.  Raises DamagedError."""
    with collection_paused():
        return Metadata(dict(_entries(contents)))


def _entries(contents: Contents) -> Iterator[tuple[str, BytesStorageMetadata | TensorStorageMetadata]]:
    for name in contents.objects:
        yield name, BytesStorageMetadata()
    for name, tensor in contents.tensors.items():
        yield (
            name,
            TensorStorageMetadata(
                TensorProperties(dtype=_dtype(name, tensor)),
                torch.Size(tensor.size),
                [ChunkStorageMetadata(torch.Size(p.offsets), torch.Size(p.sizes)) for p in tensor.pieces],
            ),
        )


def load(
    reader: CheckedReader, tensors: dict[str, torch.Tensor], group: Any | None, *, limits: Limits | None = None
) -> None:
    """Fill `tensors` in place, on all ranks together: all succeed, or all raise.

    Raises:
        DamagedError: some byte is not what the manifest says, or cannot be read.
    """
    own: str | None = None
    turn = dist.get_rank(group) / dist.get_world_size(group) if group is not None else 0.0
    try:
        reader.fill(tensors, limits=limits, turn=turn)
    except DamagedError as error:
        own = str(error)
    failures = _all_failures(own, group)
    if failures:
        rank, text = min(failures.items())
        raise DamagedError(text if len(failures) == 1 else f"rank {rank} of {len(failures)}: {text}")


def _all_failures(own: str | None, group: Any | None) -> dict[int, str]:
    """Return what went wrong on each rank of a group, on all of them alike."""
    if group is None:
        return {} if own is None else {0: own}
    any_failed = torch.tensor([int(own is not None)])
    dist.all_reduce(any_failed, op=dist.ReduceOp.MAX, group=group)
    if not int(any_failed):
        return {}
    return {rank: text for rank, text in enumerate(groups.all_gather(own, group)) if text is not None}


def _dtype(name: str, tensor: TensorEntry) -> torch.dtype:
    found = getattr(torch, tensor.dtype, None)
    if not isinstance(found, torch.dtype):
        raise DamagedError(f"{name} is of type {tensor.dtype!r}, which this torch ({torch.__version__}) does not have")
    return found


def root_cause(error: BaseException) -> str:
    """Return what is behind DCP's exception, on one line."""
    if isinstance(error, CheckpointException) and error.failures:
        rank, (cause, _) = min(error.failures.items())
        text = str(cause) or type(cause).__name__
        return text if len(error.failures) == 1 else f"rank {rank} of {len(error.failures)}: {text}"
    return str(error) or type(error).__name__
