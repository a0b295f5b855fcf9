"""A load from end to end: plan, then threads that read chunks, have them checked, and copy what is wanted out of them.

    what is wanted (boxes of stored tensors, and where they go) -> tasks: a chunk of a file each -> threads
    -> read and check a chunk -> its bytes to their places: as they are where that is possible, else by torch

Chunks of which nothing is needed are not read.  Nothing is unpickled into code, and memory beyond the tensors is
bounded.  Archives of one type and size have the same head, which is recognised.
"""

from __future__ import annotations

import ctypes
import io
import math
import os
import sys
import threading
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import xxhash

from stepkeeper_trainer.errors import DamagedError
from stepkeeper_trainer.formats.items import HEAD_BYTES, ItemError, Layout, read_head
from stepkeeper_trainer.formats.plain import open_descriptor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from typing_extensions import Self

    from stepkeeper_trainer.formats.items import Layout
    from stepkeeper_trainer.formats.manifest import FileEntry, Manifest


PIECE_BYTES = 512 * 1024  # read and hashed at once


class Source:
    """A file of the step directory, read by place."""

    def __init__(self, directory: Path, file: str, entry: FileEntry) -> None:
        """Open it.  Raises DamagedError where it cannot be what the manifest says."""
        path = directory / file
        self.path, self.entry, self.name = path, entry, ""
        if not entry.lists_chunks:
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


THREADS_MIN, THREADS_MAX = 2, 16  # of a page cache, more readers than cores only take the caches of each other
MEMORY_BYTES = 1024 * 1024 * 1024  # beyond the tensors themselves


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

    `turn`, in [0, 1), says where in the work to begin.  Ranks of a node that read the same begin at different places:
    what one has read is in the page cache for the others.

    Raises:
        DamagedError: some byte is not what the manifest says, or cannot be read.  Targets may be filled in part.
    """
    limits = limits or Limits()
    load = Load(directory, manifest, limits.memory_bytes)
    tasks = list(plan(directory, manifest, [item for item in wanted if item.target.numel()], load.layouts))
    cut = int(turn * len(tasks))
    _run(load, tasks[cut:] + tasks[:cut], limits.count_threads())
    return load.bytes_read


def _run(load: Load, tasks: list[Task], threads_max: int) -> None:
    """Carry out tasks on threads.  Raises what the first one to fail raised."""
    queue, lock = iter(tasks), threading.Lock()

    def work() -> None:
        worker = Worker(load)
        try:
            while not load.failed():
                with lock:
                    task = next(queue, None)
                if task is None:
                    return
                worker.carry_out(task)
        except BaseException as error:  # noqa: BLE001  # raised again by the calling thread
            load.fail(error)
        finally:
            worker.close()

    count = min(threads_max, len(tasks))
    threads = [threading.Thread(target=work, name=f"load-{i}", daemon=True) for i in range(count - 1)]
    for thread in threads:
        thread.start()
    work()
    for thread in threads:
        thread.join()  # none waits for longer than one chunk takes to read, once there is an error
    if load.error is not None:
        raise load.error


class Worker:
    """One thread's buffer and open file."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self._buffer = bytearray()
        self._file: Source | None = None

    def close(self) -> None:
        """Close the file that was read last."""
        if self._file is not None:
            self._file.close()

    def carry_out(self, task: Task) -> None:
        """Read what a task names, and put it where it goes.

        Raises:
            DamagedError: some byte is not what the manifest says, or cannot be read.
        """
        match task:
            case ChunkTask():
                source = self._open(task.file)
                needed = source.entry.chunk_bytes
            case RowsTask(item=item):
                source = self._open(item.file)
                needed = 2 * source.entry.chunk_bytes + item.length // max(1, item.sizes[0])
            case WholeTask(item=item):
                source = self._open(item.file)
                needed = source.entry.chunk_bytes + 3 * item.length
        budget = self._load.budget
        budget.take(needed, self._load.failed)
        try:
            match task:
                case ChunkTask():
                    self._chunk_task(task, source)
                case RowsTask():
                    self._rows_task(task, source)
                case WholeTask():
                    self._whole_task(task.item, source)
        finally:
            budget.give(needed)

    def _open(self, file: str) -> Source:
        if self._file is None or self._file.name != file:
            self.close()
            self._file = None
            self._file = open_source(self._load.directory, self._load.manifest, file)
            self._file.name = file
        return self._file

    def _checked(self, source: Source, index: int) -> memoryview:
        """Read a chunk and check it; the view is good until the next one."""
        size = min(source.entry.chunk_bytes, source.entry.bytes - index * source.entry.chunk_bytes)
        if len(self._buffer) < size:
            self._buffer = bytearray(size)
        view = memoryview(self._buffer)[:size]
        source.read_chunk(index, view)
        self._load.count(size)
        return view

    def _chunk_task(self, task: ChunkTask, source: Source) -> None:
        view = self._checked(source, task.index)
        base = task.index * source.entry.chunk_bytes
        for at, expected in task.heads:
            if view[at - base : at - base + len(expected)] != expected:
                raise DamagedError(f"{source.path}: byte {at} and after changed while they were read")
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._buffer))
        for run in task.runs:
            copy_bytes(address + run.start - base, view[run.start - base :], run.length, run.target)
        for item in task.inside:
            archive = view[item.start - base : item.end - base]
            try:
                layout = self._load.layouts.of(item, archive)
            except ItemError:
                copy_box(load_plain(archive, item, source.path), item)
                continue
            run_of = item.run() if layout.contiguous and item.takes_bytes() else None
            if run_of is not None:
                at = layout.head_bytes + run_of[0]
                copy_bytes(address + item.start - base + at, archive[at:], run_of[1], item.target)
            else:
                data = archive[layout.head_bytes : layout.head_bytes + layout.storage_bytes]
                copy_box(strided(bytearray(data), layout, item), item)

    def _rows_task(self, task: RowsTask, source: Source) -> None:
        """Go through the rows that are wanted, chunk by chunk; what is left of a row waits for the next chunk."""
        item, chunk_bytes = task.item, source.entry.chunk_bytes
        rows = math.prod(item.sizes[1:])
        row_bytes = rows * item.dtype.itemsize
        data_at = item.start + task.layout.head_bytes
        begin = data_at + item.box_offsets[0] * row_bytes
        end = begin + item.box_sizes[0] * row_bytes
        heads = {index for index, _, _ in by_chunk(item.start, data_at, chunk_bytes)}
        data = {index: (lo, hi) for index, lo, hi in by_chunk(begin, end, chunk_bytes)}
        rest, done = bytearray(), 0
        for index in sorted(heads | data.keys()):
            view, base = self._checked(source, index), index * chunk_bytes
            for at, stop in ((lo, hi) for i, lo, hi in by_chunk(item.start, data_at, chunk_bytes) if i == index):
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

    def _whole_task(self, item: Wanted, source: Source) -> None:
        archive = bytearray()
        for index, lo, hi in by_chunk(item.start, item.end, source.entry.chunk_bytes):
            base = index * source.entry.chunk_bytes
            archive += self._checked(source, index)[lo - base : hi - base]
        place(archive, item, self._load.layouts, source.path)


class Budget:
    """Memory that tasks share.  A task that needs more than there is runs when no other does."""

    def __init__(self, limit: int) -> None:
        self._limit, self._used = limit, 0
        self._changed = threading.Condition()

    def take(self, count: int, give_up: Callable[[], bool]) -> None:
        """Wait until there is so much left, or `give_up` says that nobody needs it."""
        with self._changed:
            while self._used and self._used + count > self._limit and not give_up():
                self._changed.wait(0.1)
            self._used += count

    def give(self, count: int) -> None:
        """Give it back."""
        with self._changed:
            self._used -= count
            self._changed.notify_all()


class Load:
    """One load."""

    def __init__(self, directory: Path, manifest: Manifest, memory_bytes: int) -> None:
        self.directory, self.manifest = directory, manifest
        self.budget, self.layouts = Budget(memory_bytes), Layouts(directory)
        self.error: BaseException | None = None  # what the first thread to fail raised
        self.bytes_read = 0
        self._lock = threading.Lock()

    def failed(self) -> bool:
        """Whether no more is to be read."""
        return self.error is not None

    def fail(self, error: BaseException) -> None:
        """Have all threads stop; the first error is the one that is raised."""
        with self._lock:
            self.error = self.error or error

    def count(self, size: int) -> None:
        """Take note of bytes that were read."""
        with self._lock:
            self.bytes_read += size


def copy_bytes(address: int, view: memoryview, count: int, target: torch.Tensor) -> None:
    """Copy bytes to a contiguous tensor of so many bytes."""
    assert len(view) >= count == target.numel() * target.itemsize, "a run fits its place"
    if target.device.type == "cpu":
        ctypes.memmove(target.data_ptr(), address, count)  # without the interpreter lock, and on this thread alone
    else:
        target.view(-1).view(torch.uint8).copy_(torch.frombuffer(view, dtype=torch.uint8, count=count))


def place(archive: bytearray, item: Wanted, layouts: Layouts, path: Path) -> None:
    """Copy what is wanted of an archive of the file at `path`.  Raises DamagedError where it is another tensor."""
    try:
        layout = layouts.of(item, archive)
    except ItemError:
        copy_box(load_plain(archive, item, path), item)
        return
    data = archive[layout.head_bytes : layout.head_bytes + layout.storage_bytes]
    copy_box(strided(data, layout, item), item)


def strided(data: bytearray, layout: Layout, item: Wanted) -> torch.Tensor:
    """Return the stored piece over its data, whatever its strides."""
    count = len(data) // item.dtype.itemsize
    try:
        return torch.frombuffer(data, dtype=item.dtype, count=count).as_strided(
            layout.size, layout.stride, layout.offset
        )
    except RuntimeError as error:
        raise DamagedError(f"{item.file}: {item.name} is larger than its data") from error


def load_plain(archive: memoryview | bytearray, item: Wanted, path: Path) -> torch.Tensor:
    """Let torch read an archive of an unusual kind, without running anything of it."""
    try:
        found = torch.load(io.BytesIO(archive), map_location="cpu", weights_only=True)
    except Exception as error:  # whatever torch raises for it
        raise DamagedError(f"{path}: {item.name} cannot be read as a tensor: {error}") from error
    if not isinstance(found, torch.Tensor) or tuple(found.shape) != item.sizes:
        raise DamagedError(f"{path}: {item.name} is not the tensor that `.metadata` says")
    return found.detach()


def copy_box(source: torch.Tensor, item: Wanted) -> None:
    """Copy the box that is wanted of a stored piece."""
    for dim, (offset, size) in enumerate(zip(item.box_offsets, item.box_sizes, strict=True)):
        source = source.narrow(dim, offset, size)
    with torch.no_grad():
        item.target.copy_(source)


class Layouts:
    """Of one step directory, for all threads of a load."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._lock = threading.Lock()
        self._known: dict[tuple[torch.dtype, tuple[int, ...]], tuple[bytes, Layout]] = {}

    def of(self, item: Wanted, data: bytes | bytearray | memoryview) -> Layout:
        """Read the head of an archive, or recognise it.

        Raises:
            ItemError: it is of an unusual kind, which torch must read.
            DamagedError: it is not the tensor that `.metadata` says.
        """
        with self._lock:
            return self._of(item, data)

    def _of(self, item: Wanted, data: bytes | bytearray | memoryview) -> Layout:
        key = (item.dtype, item.sizes)
        known = self._known.get(key)
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
        self._known[key] = (begin[: layout.head_bytes], layout)
        return layout
