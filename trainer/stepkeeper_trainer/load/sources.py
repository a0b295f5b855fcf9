"""The files of a step directory as a load reads them: by place, a chunk at a time, checked."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import xxhash

from stepkeeper_trainer.errors import DamagedError
from stepkeeper_trainer.formats.plain import open_descriptor

if TYPE_CHECKING:
    from collections.abc import Iterator

    from typing_extensions import Self

    from stepkeeper_trainer.formats.manifest import FileEntry, Manifest


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
        """Read bytes unchecked: whoever uses them compares them with the checked ones."""
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
