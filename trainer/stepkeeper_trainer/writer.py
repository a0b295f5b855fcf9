"""The bytes of a save: each file is written once, hashed as it is written, and durable before it is reported.

Files are written beside each other by threads of their own; an error of any of them is an error of the
save.  A file whose bytes are those of the step before can be linked instead (see `incremental`).
"""

from __future__ import annotations

import contextlib
import os
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import xxhash

from stepkeeper_trainer.formats.manifest import CHUNK_BYTES, FileEntry

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from stepkeeper_trainer.staging import Piece, Staging

SEAL_BYTES = 4 * 1024 * 1024  # CRCs are filled in so far ahead of the hashing and writing


class Digester:
    """The digests of a file that is given front to back."""

    def __init__(self) -> None:
        self._whole = xxhash.xxh3_128()
        self._chunk = xxhash.xxh3_128()
        self._chunks: list[str] = []
        self.bytes = 0

    def update(self, view: memoryview) -> None:
        """Take in the next bytes."""
        self._whole.update(view)
        rest = view
        while rest:
            room = CHUNK_BYTES - self.bytes % CHUNK_BYTES
            piece = rest[:room]
            self._chunk.update(piece)
            self.bytes += len(piece)
            rest = rest[room:]
            if self.bytes % CHUNK_BYTES == 0:
                self._close_chunk()

    def entry(self) -> FileEntry:
        """Return what the manifest says of the file; nothing may follow."""
        if self.bytes % CHUNK_BYTES:
            self._close_chunk()
        return FileEntry(bytes=self.bytes, xxh3_128=self._whole.hexdigest(), chunks=tuple(self._chunks))

    def _close_chunk(self) -> None:
        self._chunks.append(self._chunk.hexdigest())
        self._chunk.reset()


class HashingFile:
    """A new file, written front to back; `entry` is known once it is closed, and then it is durable."""

    def __init__(self, path: Path) -> None:
        """Create the file.  Raises FileExistsError where it is there already."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        self._descriptor: int | None = os.open(path, flags, 0o666)
        self._digester = Digester()
        self._flushed = 0
        self.entry: FileEntry | None = None

    def write(self, data: Any) -> int:
        """Write and hash.  Raises OSError."""
        assert self._descriptor is not None, "closed"
        view = memoryview(data).cast("B")
        rest = view
        while rest:
            rest = rest[os.write(self._descriptor, rest) :]
        self._digester.update(view)
        self._start_writeback()
        return len(view)

    def close(self) -> None:
        """Make the file durable.  Raises OSError."""
        if self._descriptor is None:
            return
        try:
            os.fsync(self._descriptor)
        finally:
            descriptor, self._descriptor = self._descriptor, None
            os.close(descriptor)
        self.entry = self._digester.entry()

    def abandon(self) -> None:
        """Close without a promise, after an error."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            with contextlib.suppress(OSError):  # the error that brought us here is the one to report
                os.close(descriptor)

    def _start_writeback(self) -> None:
        """Have the kernel begin to write what is complete: the disk works while we hash, and fsync waits less."""
        assert self._descriptor is not None
        upto = self._digester.bytes // CHUNK_BYTES * CHUNK_BYTES
        if upto > self._flushed:
            os.posix_fadvise(self._descriptor, self._flushed, upto - self._flushed, os.POSIX_FADV_DONTNEED)
            self._flushed = upto


@dataclass(frozen=True, slots=True)
class Sheet:
    """A file to write: its tensors, in order."""

    name: str
    pieces: tuple[Piece, ...]
    cold: bool = False  # its tensors have not changed lately: it may equal its like in the step before


@dataclass(frozen=True, slots=True)
class Written:
    """A file that is durable: where each of its tensors lies, and their CRCs, in order."""

    sheet: Sheet
    entry: FileEntry
    extents: tuple[tuple[int, int], ...]  # start and length in the file
    crcs: tuple[int, ...]
    linked: bool = False


def stretches(pieces: Sequence[Piece]) -> Iterator[tuple[int, int, list[Piece]]]:
    """Yield what is to be written as parts of the arena, with the tensors that end in each part.

    Neighbours in the arena go out together, gaps between them included.
    """
    batch: list[Piece] = []
    at = pieces[0].start if pieces else 0
    for before, piece in zip([None, *pieces], pieces, strict=False):
        apart = before is not None and not 0 <= piece.start - before.end < PAD_MAX
        if batch and (apart or batch[-1].end - at >= SEAL_BYTES):
            yield at, batch[-1].end, batch
            at = piece.start if apart else batch[-1].end
            batch = []
        batch.append(piece)
    if batch:
        yield at, batch[-1].end, batch


PAD_MAX = 64  # a gap between neighbours is shorter


def extents(pieces: Sequence[Piece]) -> tuple[tuple[int, int], ...]:
    """Return where each tensor's archive lies in a file of these."""
    found: list[tuple[int, int]] = []
    shift = pieces[0].start if pieces else 0  # place in the arena less place in the file
    for before, piece in zip([None, *pieces], pieces, strict=False):
        if before is not None and not 0 <= piece.start - before.end < PAD_MAX:
            shift = piece.start - (before.end - shift)
        found.append((piece.start - shift, piece.frame.length))
    return tuple(found)


def digest_sheet(staging: Staging, sheet: Sheet, check: Callable[[], None]) -> tuple[FileEntry, tuple[int, ...]]:
    """Return what a file would hold, without writing it.  `check` raises where nobody needs it any more."""
    digester = Digester()
    crcs: list[int] = []
    view = staging.arena.view
    for start, end, batch in stretches(sheet.pieces):
        check()
        crcs += staging.seal(batch)
        digester.update(view[start:end])
    return digester.entry(), tuple(crcs)


def write_sheet(directory: Path, staging: Staging, sheet: Sheet, check: Callable[[], None]) -> Written:
    """Write one file.  `check` is called now and then, and raises where the save must end.

    Raises:
        OSError: the disk refuses; a part of the file may be there.
    """
    file = HashingFile(directory / sheet.name)
    crcs: list[int] = []
    view = staging.arena.view
    try:
        for start, end, batch in stretches(sheet.pieces):
            crcs += staging.seal(batch)
            for at in range(start, end, CHUNK_BYTES):
                check()
                file.write(view[at : min(end, at + CHUNK_BYTES)])
        check()
        file.close()
    except BaseException:
        file.abandon()
        raise
    assert file.entry is not None
    return Written(sheet, file.entry, extents(sheet.pieces), tuple(crcs))


def in_threads(jobs: Sequence[Callable[[], Written]]) -> list[Written]:
    """Do jobs beside each other.  Raises the first error, once all have ended."""
    results: list[Written | BaseException | None] = [None] * len(jobs)

    def work(number: int) -> None:
        try:
            results[number] = jobs[number]()
        except BaseException as error:  # noqa: BLE001  # raised below, in the save's own thread
            results[number] = error

    threads = [threading.Thread(target=work, args=(n,), daemon=True) for n in range(1, len(jobs))]
    for thread in threads:
        thread.start()
    if jobs:
        work(0)
    for thread in threads:
        thread.join()
    found: list[Written] = []
    for result in results:
        if isinstance(result, BaseException):
            raise result
        assert result is not None
        found.append(result)
    return found
