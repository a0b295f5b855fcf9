"""The bytes of a save: each file is written once, hashed as it is written, and durable before it is reported.

Files are written beside each other by threads of their own; an error of any of them is an error of the save.  Where the
save asks for it, each rank reads its own files back from the disk: storage that says "durable" and has other bytes is
found while the state is still in memory and older steps are there.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import threading
import time
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import xxhash

from stepkeeper_trainer.buffers import crc32, put_crc
from stepkeeper_trainer.errors import SaveError
from stepkeeper_trainer.formats.manifest import CHUNK_BYTES, FileEntry
from stepkeeper_trainer.formats.plain import naming
from stepkeeper_trainer.formats.reading import Reading, read, tasks_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from typing_extensions import Self

    from stepkeeper_trainer.formats.manifest import FileEntry
    from stepkeeper_trainer.save.save import Save


SEAL_BYTES = 4 * 1024 * 1024  # a CRC, hashes, and then the next: what is at hand in the cache is not fetched again
DIRECT_BYTES_MIN = 4 * 1024 * 1024  # smaller files go through the page cache
WRITE_BYTES = 16 * 1024 * 1024  # at once
PAGE_BYTES = 4096


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
    """A new file, written front to back; `entry` is known once it is closed, and then it is durable.

    As a context it is closed at the end, and after an error without a promise.
    """

    def __init__(self, path: Path, *, direct: bool = False) -> None:
        """Create the file; `direct`: past the page cache, where the file system has that.

        Raises FileExistsError where it is there already.
        """
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        self._path = path
        self._descriptor: int | None = os.open(path, flags, 0o666)
        self._digester = Digester()
        self._written = self._flushed = 0
        self._entry: FileEntry | None = None
        try:
            self._direct = direct and self._set_direct(on=True)
        except OSError:
            self.abandon()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self.abandon()

    @property
    def entry(self) -> FileEntry:
        """What the manifest says of the file, once it is closed."""
        assert self._entry is not None, "not closed"
        return self._entry

    def write(self, data: Any) -> int:
        """Write and hash.  Raises OSError."""
        view = memoryview(data).cast("B")
        self.put(view)
        self.take_in(view)
        return len(view)

    def take_in(self, view: memoryview) -> None:
        """Hash the next bytes: they are put into the file apart from that."""
        self._digester.update(view)

    def put(self, view: memoryview) -> None:
        """Put the next bytes into the file: of whole pages in memory, where it is direct.  Raises OSError."""
        assert self._descriptor is not None, "closed"
        with naming(self._path):
            self._put(view)
        if not self._direct:
            self._start_writeback()

    def _put(self, view: memoryview) -> None:
        assert self._descriptor is not None
        while view:
            try:
                count = os.write(self._descriptor, view)
            except OSError as error:
                if error.errno != errno.EINVAL or not self._direct:
                    raise
                self._direct = self._set_direct(on=False)  # opened so, and yet refused: some file systems do
                continue
            view = view[count:]
            self._written += count
            if self._direct and count % PAGE_BYTES:
                self._direct = self._set_direct(on=False)  # the rest of a write that was cut short is not aligned

    def cut(self) -> None:
        """Take away what was put beyond what was hashed.  Raises OSError."""
        assert self._descriptor is not None, "closed"
        if self._written > self._digester.bytes:
            with naming(self._path):
                os.ftruncate(self._descriptor, self._digester.bytes)

    def close(self) -> None:
        """Make the file durable.  Raises OSError, also where it has another size than was written."""
        if self._descriptor is None:
            return
        try:
            with naming(self._path):
                os.fsync(self._descriptor)
                _require_size(self._descriptor, self._digester.bytes)
        finally:
            descriptor, self._descriptor = self._descriptor, None
            os.close(descriptor)
        self._entry = self._digester.entry()

    def abandon(self) -> None:
        """Close without a promise, after an error."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            with contextlib.suppress(OSError):  # the error that brought us here is the one to report
                os.close(descriptor)

    def _set_direct(self, *, on: bool) -> bool:
        assert self._descriptor is not None
        flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
        try:
            fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags | os.O_DIRECT if on else flags & ~os.O_DIRECT)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            return False  # this file system has no such thing
        return on

    def _start_writeback(self) -> None:
        """Have the kernel begin to write what is complete: the disk works while we hash, and fsync waits less."""
        assert self._descriptor is not None
        upto = self._written // CHUNK_BYTES * CHUNK_BYTES
        if upto > self._flushed:
            os.posix_fadvise(self._descriptor, self._flushed, upto - self._flushed, os.POSIX_FADV_DONTNEED)
            self._flushed = upto


def _require_size(descriptor: int, size: int) -> None:
    """Look at our own file while it is open, which costs shared storage nothing: rank 0 need not look at all files."""
    found = os.fstat(descriptor).st_size
    if found != size:
        raise OSError(errno.EIO, f"{found} bytes are there, and {size} were written")


Extent = tuple[int, int, int, int, int, int]
"""One archive in the arena: where it begins, its data begins, its data ends, its CRC belongs (twice), it ends."""


class FilePlan(msgspec.Struct, frozen=True):
    """A file to write: the archives in it, in order."""

    name: str
    extents: tuple[Extent, ...]


PAD_MAX = 64  # a gap between neighbours is shorter


def runs(extents: Sequence[Extent]) -> Iterator[tuple[int, int, Sequence[Extent]]]:
    """Yield what lies together in the arena, gaps between neighbours included: begin, end, and the archives."""
    first = 0
    for number in range(1, len(extents) + 1):
        if number == len(extents) or not 0 <= extents[number][0] - extents[number - 1][5] < PAD_MAX:
            yield extents[first][0], extents[number - 1][5], extents[first:number]
            first = number


def places_in_file(extents: Sequence[Extent]) -> tuple[tuple[int, int], ...]:
    """Return where each archive lies in a file of these: begin and length."""
    found: list[tuple[int, int]] = []
    at = 0
    for begin, end, members in runs(extents):
        found += [(at + extent[0] - begin, extent[5] - extent[0]) for extent in members]
        at += end - begin
    return tuple(found)


def seal(view: memoryview, extents: Sequence[Extent]) -> Iterator[int]:
    """Fill in the CRCs of archives that lie together, and say now and then up to where the arena is complete."""
    said = extents[0][0] if extents else 0
    for _, data, tail, first, second, end in extents:
        crc, at = 0, data
        while tail - at > SEAL_BYTES:
            crc = crc32(view[at : at + SEAL_BYTES], crc)
            at += SEAL_BYTES
            yield (said := at)
        crc = crc32(view[at:tail], crc)
        put_crc(view, first, second, crc)
        if end - said >= SEAL_BYTES:
            yield (said := end)
    if extents and said < extents[-1][5]:
        yield extents[-1][5]


def write_file(
    directory: Path, view: memoryview, plan: FilePlan, check: Callable[[], None], *, direct: bool = False
) -> FileEntry:
    """Write one file out of the arena.  `check` is called now and then, and raises where the save must end.

    With `direct` it goes from the arena to the disk: nothing is copied into the page cache, so that training loses
    neither time of its cores nor memory to it.

    Raises:
        OSError: the disk refuses; a part of the file may be there.
    """
    parts = list(runs(plan.extents))
    size = sum(end - begin for begin, end, _ in parts)
    direct = direct and size >= DIRECT_BYTES_MIN and len(parts) == 1 and parts[0][0] % PAGE_BYTES == 0
    with HashingFile(directory / plan.name, direct=direct) as file:
        for begin, end, members in parts:
            hashed = put = begin
            for upto in seal(view, members):
                check()
                file.take_in(view[hashed:upto])
                hashed = upto
                whole = upto // PAGE_BYTES * PAGE_BYTES if direct else upto
                if whole - put >= WRITE_BYTES:
                    file.put(view[put:whole])
                    put = whole
            file.put(view[put : -(-end // PAGE_BYTES) * PAGE_BYTES if direct else end])
        check()
        file.cut()
    return file.entry


Result = TypeVar("Result")


def in_threads(jobs: Sequence[Callable[[], Result]]) -> list[Result]:
    """Do jobs beside each other.  Raises the first error, once all have ended."""
    results: list[tuple[Result] | BaseException | None] = [None] * len(jobs)

    def work(number: int) -> None:
        try:
            results[number] = (jobs[number](),)
        except BaseException as error:  # noqa: BLE001  # raised below, in the save's own thread
            results[number] = error

    threads = [threading.Thread(target=work, args=(n,), daemon=True) for n in range(1, len(jobs))]
    for thread in threads:
        thread.start()
    if jobs:
        work(0)
    for thread in threads:
        thread.join()
    found: list[Result] = []
    for result in results:
        if isinstance(result, BaseException):
            raise result
        assert result is not None
        found.append(result[0])
    return found


THREADS = 2  # a rank: training has the other cores


def read_back(save: Save, directory: Path, files: Mapping[str, FileEntry]) -> None:
    """Compare what the disk gives with what was written, past the page cache where the file system can do that.

    Only where the save asks for it.

    Raises:
        SaveError: the save is over, or the disk gives other bytes; the cause is an OSError then, for that is storage.
    """
    if not save.read_back:
        return

    def over() -> bool:
        return save.cancelled is not None or time.time() >= save.limit_at

    how = Reading(threads=THREADS, from_disk=True, first_only=True, should_stop=over)
    found = read(directory, tasks_of(dict(files), list(files), how.count_threads()), how)
    save.check()
    if problems := found.lines(list(files)):
        text = f"read back from the disk: {problems[0]}"
        raise SaveError(text) from OSError(errno.EIO, text)
