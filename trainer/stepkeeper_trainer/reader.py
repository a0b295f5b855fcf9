"""Reading a step directory: every chunk is checked against the manifest before a byte of it is used.

Also where only slices are read (another world size), and `.metadata` before it is parsed.  Pickled items
are never loaded.
"""

from __future__ import annotations

import io
import os
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import xxhash
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader
from torch.distributed.checkpoint.planner import LoadItemType
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

from stepkeeper_trainer.errors import DamagedError

if TYPE_CHECKING:
    from collections.abc import Generator

    import torch
    from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
    from torch.futures import Future

    from stepkeeper_trainer.formats.manifest import FileEntry, Manifest

_CHUNKS_KEPT = 4  # a tensor's item is read at its end first, then from its start


class CheckedFile(io.RawIOBase):
    """A file that gives out checked bytes only."""

    def __init__(self, path: Path, entry: FileEntry) -> None:
        """Open it.  Raises OSError, or DamagedError where its size is wrong."""
        super().__init__()
        self._path, self._entry, self._at = path, entry, 0
        self._chunks: dict[int, bytes] = {}
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
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


class _CheckedFileSystem(FileSystem):
    def __init__(self, directory: Path, manifest: Manifest) -> None:
        super().__init__()
        self._directory, self._manifest = directory, manifest

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[io.IOBase, None, None]:
        assert mode == "rb", "a load only reads"
        name = str(Path(path).relative_to(self._directory))
        entry = self._manifest.files.get(name)
        if entry is None:
            raise DamagedError(f"{path}: not in the manifest")
        with CheckedFile(Path(path), entry) as raw, io.BufferedReader(raw, 1024 * 1024) as file:
            yield cast("io.IOBase", file)


class CheckedReader(FileSystemReader):
    """DCP's reader over checked bytes."""

    def __init__(self, directory: Path, manifest: Manifest) -> None:
        super().__init__(directory)
        self.fs = _CheckedFileSystem(directory, manifest)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill the tensors.  Raises DamagedError for wrong bytes and for pickled items."""
        for item in plan.items:
            if item.type is LoadItemType.BYTE_IO:
                raise DamagedError(f"{self.path}: {item.storage_index.fqn} is a pickle, which is never loaded")
        return super().read_data(plan, planner)


def load(reader: CheckedReader, tensors: dict[str, torch.Tensor], group: Any | None) -> None:
    """Fill `tensors` in place, on all ranks together.

    Raises:
        DamagedError: some byte is not what the manifest says, or cannot be read.
    """
    try:
        dcp_load(cast("dict[str, Any]", tensors), storage_reader=reader, process_group=group, no_dist=group is None)
    except CheckpointException as error:  # a BaseException
        raise DamagedError(root_cause(error)) from error


def root_cause(error: BaseException) -> str:
    """Return what is behind DCP's exception, on one line."""
    if isinstance(error, CheckpointException) and error.failures:
        rank, (cause, _) = min(error.failures.items())
        text = str(cause) or type(cause).__name__
        return text if len(error.failures) == 1 else f"rank {rank} of {len(error.failures)}: {text}"
    return str(error) or type(error).__name__
