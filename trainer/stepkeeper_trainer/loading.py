"""Filling tensors from a step directory: on threads, each chunk checked before a byte of it is copied.

Chunks of which nothing is needed are not read.  Nothing is unpickled into code, and memory beyond the tensors is
bounded.
"""

from __future__ import annotations

import ctypes
import io
import math
import os
import sys
import threading
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
import xxhash

from stepkeeper_trainer.errors import DamagedError
from stepkeeper_trainer.formats.items import HEAD_BYTES, ItemError, Layout, read_head
from stepkeeper_trainer.formats.plain import FLAGS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stepkeeper_trainer.formats.manifest import FileEntry, Manifest

THREADS_MIN, THREADS_MAX = 4, 16
MEMORY_BYTES = 1024 * 1024 * 1024  # beyond the tensors themselves
CHUNK_BYTES_MAX = 256 * 1024 * 1024  # a manifest that names larger ones is not of ours
PIECE_BYTES = 512 * 1024  # read and hashed at once


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a load may take."""

    threads: int | None = None  # None: by the number of cores
    memory_bytes: int = MEMORY_BYTES  # beyond the tensors; one chunk and one row of a tensor are always possible

    def count_threads(self) -> int:
        """Return how many threads read."""
        if self.threads is not None:
            return max(1, self.threads)
        return min(THREADS_MAX, max(THREADS_MIN, len(os.sched_getaffinity(0))))


def fill(
    directory: Path, manifest: Manifest, wanted: list[Wanted], *, limits: Limits | None = None, turn: float = 0.0
) -> int:
    """Copy what is wanted out of a step directory, and return how many bytes were read.

    Args:
        directory: the step directory.
        manifest: of it.
        wanted: what to copy, and where to.
        limits: threads and memory.
        turn: in [0, 1): where in the work to begin.  Ranks of a node that read the same begin at different places:
            what one has read is in the page cache for the others.

    Raises:
        DamagedError: some byte is not what the manifest says, or cannot be read.  Targets may be filled in part.
    """
    load = _Load(directory, manifest, limits or Limits())
    tasks = list(load.plan([item for item in wanted if item.target.numel()]))
    cut = int(turn * len(tasks))
    load.run(tasks[cut:] + tasks[:cut])
    return load.bytes_read


# Tasks ------------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Run:
    """Bytes of a file that go, as they are, to a place in memory."""

    start: int
    length: int
    target: torch.Tensor  # contiguous, of the stored type


@dataclass(slots=True)
class _ChunkTask:
    """One chunk of one file, and what is wanted of it."""

    file: str
    index: int
    runs: list[_Run] = field(default_factory=list)
    inside: list[Wanted] = field(default_factory=list)  # archives that lie in it as a whole
    heads: list[tuple[int, bytes]] = field(default_factory=list)  # bytes that were read unchecked: place and content


@dataclass(slots=True)
class _RowsTask:
    """An archive over several chunks, of which rows are wanted, or parts of rows."""

    item: Wanted
    head: bytes
    layout: Layout


@dataclass(slots=True)
class _WholeTask:
    """An archive of an unusual kind, read as a whole."""

    item: Wanted


_Task = _ChunkTask | _RowsTask | _WholeTask


class _Budget:
    """Memory that tasks share.  A task that needs more than there is runs when no other does."""

    def __init__(self, limit: int) -> None:
        self._limit, self._used = limit, 0
        self._changed = threading.Condition()

    def take(self, count: int, give_up: Callable[[], bool]) -> None:
        with self._changed:
            while self._used and self._used + count > self._limit and not give_up():
                self._changed.wait(0.1)
            self._used += count

    def give(self, count: int) -> None:
        with self._changed:
            self._used -= count
            self._changed.notify_all()


class _Load:
    def __init__(self, directory: Path, manifest: Manifest, limits: Limits) -> None:
        self._directory, self._manifest, self._limits = directory, manifest, limits
        self._budget = _Budget(limits.memory_bytes)
        self._lock = threading.Lock()
        self._error: BaseException | None = None
        self._layouts: dict[tuple[torch.dtype, tuple[int, ...]], tuple[bytes, Layout]] = {}
        self.bytes_read = 0

    # -- planning

    def plan(self, wanted: list[Wanted]) -> Iterator[_Task]:
        """Turn what is wanted into tasks, in the order of the files."""
        by_file: dict[str, list[Wanted]] = defaultdict(list)
        for item in wanted:
            by_file[item.file].append(item)
        for file, items in by_file.items():
            entry = self._entry(file)
            chunks: dict[int, _ChunkTask] = {}
            others: list[_Task] = []
            with _File(self._directory / file, entry) as source:
                for item in items:
                    if item.start < 0 or item.length <= 0 or item.end > entry.bytes:
                        raise DamagedError(f"{source.path}: {item.name} lies outside of it")
                    others += self._plan_item(item, source, chunks)
            yield from (chunks[index] for index in sorted(chunks))
            yield from others

    def _plan_item(self, item: Wanted, source: _File, chunks: dict[int, _ChunkTask]) -> list[_Task]:
        size = source.entry.chunk_bytes
        first, last = item.start // size, (item.end - 1) // size

        def chunk(index: int) -> _ChunkTask:
            return chunks.setdefault(index, _ChunkTask(item.file, index))

        if first == last:
            chunk(first).inside.append(item)
            return []
        head = source.peek(item.start, min(HEAD_BYTES, item.length))
        try:
            layout = self._layout(item, head)
        except ItemError:
            return [_WholeTask(item)]
        if not layout.contiguous:
            return [_WholeTask(item)]
        head = head[: layout.head_bytes]
        run = item.run()
        if run is None or not _takes_bytes(item):
            return [_RowsTask(item, head, layout)]
        for index, begin, end in _by_chunk(item.start, item.start + len(head), size):
            chunk(index).heads.append((begin, head[begin - item.start : end - item.start]))
        at = item.start + layout.head_bytes + run[0]
        flat = item.target.view(-1)
        for index, begin, end in _by_chunk(at, at + run[1], size):
            # a number may lie over two chunks: bytes, and not numbers, are copied
            piece = flat.view(torch.uint8)[begin - at : end - at]
            chunk(index).runs.append(_Run(begin, end - begin, piece))
        return []

    def _layout(self, item: Wanted, data: bytes | bytearray | memoryview) -> Layout:
        """Read the head of an archive, or recognise it: archives of one type and size have the same."""
        key = (item.dtype, item.sizes)
        known = self._layouts.get(key)
        if known is not None and data[: len(known[0])] == known[0]:
            return known[1]
        begin = bytes(data[:HEAD_BYTES])
        layout = read_head(begin)
        if layout.dtype != str(item.dtype).removeprefix("torch.") or layout.size != item.sizes:
            raise DamagedError(
                f"{self._directory / item.file}: {item.name} is stored as {layout.dtype} {list(layout.size)}, "
                f"`.metadata` says {item.dtype} {list(item.sizes)}"
            )
        short = layout.contiguous and layout.storage_bytes < math.prod(item.sizes) * item.dtype.itemsize
        if short or layout.head_bytes + layout.storage_bytes > item.length:
            raise DamagedError(f"{self._directory / item.file}: the data of {item.name} has another size")
        self._layouts[key] = (begin[: layout.head_bytes], layout)
        return layout

    def _entry(self, file: str) -> FileEntry:
        entry = self._manifest.files.get(file)
        if entry is None:
            raise DamagedError(f"{self._directory / file}: not in the manifest")
        return entry

    # -- running

    def run(self, tasks: list[_Task]) -> None:
        """Carry out tasks on threads.  Raises what the first one to fail raised."""
        queue = iter(tasks)

        def work() -> None:
            worker = _Worker(self)
            try:
                while self._error is None:
                    with self._lock:
                        task = next(queue, None)
                    if task is None:
                        return
                    worker.carry_out(task)
            except BaseException as error:  # noqa: BLE001  # raised again by the calling thread
                with self._lock:
                    self._error = self._error or error
            finally:
                worker.close()

        count = min(self._limits.count_threads(), len(tasks))
        threads = [threading.Thread(target=work, name=f"load-{i}", daemon=True) for i in range(count - 1)]
        for thread in threads:
            thread.start()
        work()
        for thread in threads:
            thread.join()  # none waits for longer than one chunk takes to read, once there is an error
        if self._error is not None:
            raise self._error

    def failed(self) -> bool:
        return self._error is not None

    def count(self, size: int) -> None:
        with self._lock:
            self.bytes_read += size

    @property
    def budget(self) -> _Budget:
        return self._budget

    def open(self, file: str) -> _File:
        return _File(self._directory / file, self._entry(file))

    def layout_of(self, item: Wanted, data: bytes | bytearray | memoryview) -> Layout:
        with self._lock:
            return self._layout(item, data)


class _Worker:
    """One thread's buffer and open file."""

    def __init__(self, load: _Load) -> None:
        self._load = load
        self._buffer = bytearray()
        self._file: _File | None = None

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def carry_out(self, task: _Task) -> None:
        match task:
            case _ChunkTask():
                source = self._open(task.file)
                needed = source.entry.chunk_bytes
            case _RowsTask(item=item):
                source = self._open(item.file)
                needed = 2 * source.entry.chunk_bytes + item.length // max(1, item.sizes[0])
            case _WholeTask(item=item):
                source = self._open(item.file)
                needed = source.entry.chunk_bytes + 3 * item.length
        budget = self._load.budget
        budget.take(needed, self._load.failed)
        try:
            match task:
                case _ChunkTask():
                    self._chunk_task(task, source)
                case _RowsTask():
                    self._rows_task(task, source)
                case _WholeTask():
                    self._whole_task(task.item, source)
        finally:
            budget.give(needed)

    def _open(self, file: str) -> _File:
        if self._file is None or self._file.name != file:
            self.close()
            self._file = None
            self._file = self._load.open(file)
            self._file.name = file
        return self._file

    def _checked(self, source: _File, index: int) -> memoryview:
        """Read a chunk and check it; the view is good until the next one."""
        size = min(source.entry.chunk_bytes, source.entry.bytes - index * source.entry.chunk_bytes)
        if len(self._buffer) < size:
            self._buffer = bytearray(size)
        view = memoryview(self._buffer)[:size]
        source.read_chunk(index, view)
        self._load.count(size)
        return view

    def _chunk_task(self, task: _ChunkTask, source: _File) -> None:
        view = self._checked(source, task.index)
        base = task.index * source.entry.chunk_bytes
        for at, expected in task.heads:
            if view[at - base : at - base + len(expected)] != expected:
                raise DamagedError(f"{source.path}: byte {at} and after changed while they were read")
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._buffer))
        for run in task.runs:
            _copy(address + run.start - base, view[run.start - base :], run.length, run.target)
        for item in task.inside:
            archive = view[item.start - base : item.end - base]
            try:
                layout = self._load.layout_of(item, archive)
            except ItemError:
                _copy_box(_load_plain(archive, item, source.path), item)
                continue
            run_of = item.run() if layout.contiguous and _takes_bytes(item) else None
            if run_of is not None:
                at = layout.head_bytes + run_of[0]
                _copy(address + item.start - base + at, archive[at:], run_of[1], item.target)
            else:
                data = archive[layout.head_bytes : layout.head_bytes + layout.storage_bytes]
                _copy_box(_strided(bytearray(data), layout, item), item)

    def _rows_task(self, task: _RowsTask, source: _File) -> None:
        """Go through the rows that are wanted, chunk by chunk; what is left of a row waits for the next chunk."""
        item, chunk_bytes = task.item, source.entry.chunk_bytes
        rows = math.prod(item.sizes[1:])
        row_bytes = rows * item.dtype.itemsize
        data_at = item.start + task.layout.head_bytes
        begin = data_at + item.box_offsets[0] * row_bytes
        end = begin + item.box_sizes[0] * row_bytes
        heads = {index for index, _, _ in _by_chunk(item.start, data_at, chunk_bytes)}
        data = {index: (lo, hi) for index, lo, hi in _by_chunk(begin, end, chunk_bytes)}
        rest, done = bytearray(), 0
        for index in sorted(heads | data.keys()):
            view, base = self._checked(source, index), index * chunk_bytes
            for at, stop in ((lo, hi) for i, lo, hi in _by_chunk(item.start, data_at, chunk_bytes) if i == index):
                if view[at - base : stop - base] != task.head[at - item.start : stop - item.start]:
                    raise DamagedError(f"{source.path}: byte {at} and after changed while they were read")
            if index not in data:
                continue
            lo, hi = data[index]
            rest += view[lo - base : hi - base]
            count = len(rest) // row_bytes
            if not count:
                continue
            numbers = torch.frombuffer(rest, dtype=item.dtype, count=count * rows).view(count, *item.sizes[1:])
            for dim in range(1, len(item.sizes)):
                numbers = numbers.narrow(dim, item.box_offsets[dim], item.box_sizes[dim])
            item.target.narrow(0, done, count).copy_(numbers)
            done += count
            rest = rest[count * row_bytes :]

    def _whole_task(self, item: Wanted, source: _File) -> None:
        archive = bytearray()
        for index, lo, hi in _by_chunk(item.start, item.end, source.entry.chunk_bytes):
            base = index * source.entry.chunk_bytes
            archive += self._checked(source, index)[lo - base : hi - base]
        try:
            layout = self._load.layout_of(item, archive)
        except ItemError:
            _copy_box(_load_plain(archive, item, source.path), item)
            return
        data = archive[layout.head_bytes : layout.head_bytes + layout.storage_bytes]
        _copy_box(_strided(data, layout, item), item)


class _File:
    """A file of the step directory, read by place."""

    def __init__(self, path: Path, entry: FileEntry) -> None:
        """Open it.  Raises DamagedError where it cannot be what the manifest says."""
        self.path, self.entry, self.name = path, entry, ""
        if not 0 < entry.chunk_bytes <= CHUNK_BYTES_MAX or len(entry.chunks) != -(-entry.bytes // entry.chunk_bytes):
            raise DamagedError(f"{path}: the manifest does not list its chunks")
        try:
            self._descriptor = os.open(path, FLAGS)
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


# Copying ----------------------------------------------------------------------------------------------------------


def _by_chunk(start: int, end: int, chunk_bytes: int) -> Iterator[tuple[int, int, int]]:
    """Cut a range of bytes at the borders of chunks: index, begin, end."""
    while start < end:
        index = start // chunk_bytes
        stop = min(end, (index + 1) * chunk_bytes)
        yield index, start, stop
        start = stop


def _takes_bytes(item: Wanted) -> bool:
    """Whether stored bytes can go to the target as they are."""
    target = item.target
    return target.dtype == item.dtype and target.is_contiguous() and sys.byteorder == "little"


def _copy(address: int, view: memoryview, count: int, target: torch.Tensor) -> None:
    """Copy bytes to a contiguous tensor of so many bytes."""
    assert len(view) >= count == target.numel() * target.itemsize, "a run fits its place"
    if target.device.type == "cpu":
        ctypes.memmove(target.data_ptr(), address, count)  # without the interpreter lock, and on this thread alone
    else:
        target.view(-1).view(torch.uint8).copy_(torch.frombuffer(view, dtype=torch.uint8, count=count))


def _strided(data: bytearray, layout: Layout, item: Wanted) -> torch.Tensor:
    """Return the stored piece over its data, whatever its strides."""
    count = len(data) // item.dtype.itemsize
    try:
        return torch.frombuffer(data, dtype=item.dtype, count=count).as_strided(
            layout.size, layout.stride, layout.offset
        )
    except RuntimeError as error:
        raise DamagedError(f"{item.file}: {item.name} is larger than its data") from error


def _load_plain(archive: memoryview | bytearray, item: Wanted, path: Path) -> torch.Tensor:
    """Let torch read an archive of an unusual kind, without running anything of it."""
    try:
        found = torch.load(io.BytesIO(archive), map_location="cpu", weights_only=True)
    except Exception as error:  # whatever torch raises for it
        raise DamagedError(f"{path}: {item.name} cannot be read as a tensor: {error}") from error
    if not isinstance(found, torch.Tensor) or tuple(found.shape) != item.sizes:
        raise DamagedError(f"{path}: {item.name} is not the tensor that `.metadata` says")
    return found.detach()


def _copy_box(source: torch.Tensor, item: Wanted) -> None:
    for dim, (offset, size) in enumerate(zip(item.box_offsets, item.box_sizes, strict=True)):
        source = source.narrow(dim, offset, size)
    with torch.no_grad():
        item.target.copy_(source)


def all_failures(own: str | None, group: Any | None) -> dict[int, str]:
    """Return what went wrong on each rank of a group, on all of them alike."""
    if group is None:
        return {} if own is None else {0: own}
    any_failed = torch.tensor([int(own is not None)])
    torch.distributed.all_reduce(any_failed, op=torch.distributed.ReduceOp.MAX, group=group)
    if not int(any_failed):
        return {}
    said: list[str | None] = [None] * torch.distributed.get_world_size(group)
    torch.distributed.all_gather_object(said, own, group=group)
    return {rank: text for rank, text in enumerate(said) if text is not None}
