"""Reading the chunks of a step directory and comparing their digests: on threads, each hashed while in the cache.

Memory is bounded by the number of threads.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import xxhash

from stepkeeper_trainer.formats.manifest import FileEntry
from stepkeeper_trainer.formats.plain import open_descriptor

PIECE_BYTES = 512 * 1024  # read and hashed at once: fits the cache of a core
DISK_PIECE_BYTES = 4 * 1024 * 1024  # past the page cache nobody reads ahead: the disk wants more at once
TASK_BYTES = 64 * 1024 * 1024  # read by one thread in a row, at most
TASKS_PER_THREAD = 4
THREADS_MIN, THREADS_MAX = 4, 32  # more than cores: shared storage answers many readers at once
_ALIGNED = 4096  # for reads past the page cache
_HUGE = 2 * 1024 * 1024  # bytes of a huge page
_PAUSE_S = 0.1


def never() -> bool:
    """Return False: nobody stops it."""
    return False


def _untold(_count: int) -> None:
    """Nobody wants to know."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """How bytes are read."""

    threads: int | None = None  # None: by the number of cores that this process may use
    bytes_per_s: float | None = None  # at most
    from_disk: bool = False  # past the page cache: O_DIRECT where that works, else the cached pages are dropped first
    first_only: bool = False  # stop at the first problem
    should_stop: Callable[[], bool] = never  # asked between pieces, by several threads
    on_read: Callable[[int], None] = _untold  # told how many bytes were read, again and again, by several threads

    def count_threads(self) -> int:
        """Return how many threads read."""
        if self.threads is not None:
            return max(1, self.threads)
        return min(THREADS_MAX, max(THREADS_MIN, len(os.sched_getaffinity(0))))


@dataclass(frozen=True, slots=True)
class Task:
    """Some chunks of a file in a row."""

    name: str
    entry: FileEntry
    first: int
    last: int  # exclusive


@dataclass(slots=True)
class Found:
    """What all threads have found together."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    problems: dict[str, dict[int, str]] = field(default_factory=dict)  # by file, then by chunk
    bytes_read: int = 0
    crash: BaseException | None = None  # a mistake of ours: no verdict then

    def add(self, name: str, chunk: int, problem: str) -> None:
        """Take note of a chunk that is wrong."""
        with self.lock:
            self.problems.setdefault(name, {})[chunk] = problem

    def lines(self, order: list[str]) -> list[str]:
        """Return one line a file, of its first wrong chunk."""
        lines = []
        for name in order:
            if chunks := self.problems.get(name):
                more = f" (and {len(chunks) - 1} more places)" if len(chunks) > 1 else ""
                lines.append(chunks[min(chunks)] + more)
        return lines


def tasks_of(files: dict[str, FileEntry], names: list[str], threads: int = 1) -> list[Task]:
    """Cut files into tasks: long ones, and still several for each thread."""
    total = sum(files[name].bytes for name in names)
    size = min(TASK_BYTES, total // (TASKS_PER_THREAD * threads))
    tasks = []
    for name in names:
        entry = files[name]
        at_once = max(1, size // entry.chunk_bytes)
        tasks += [
            Task(name, entry, first, min(first + at_once, len(entry.chunks)))
            for first in range(0, len(entry.chunks), at_once)
        ]
    return tasks


def share_of(tasks: list[Task], index: int, of: int) -> list[Task]:
    """Return the chunks of one shard: all shards together have each chunk once, and bytes are split evenly."""
    total = sum(task.entry.bytes for task in tasks if task.first == 0)
    shard, before = [], 0
    for task in tasks:
        size = task.entry.chunk_bytes
        own = [chunk for chunk in range(task.first, task.last) if (before + chunk * size) * of // total == index]
        if own:
            shard.append(Task(task.name, task.entry, own[0], own[-1] + 1))
        if task.last == len(task.entry.chunks):
            before += task.entry.bytes
    return shard


def read(directory: Path, tasks: list[Task], how: Reading) -> Found:
    """Read tasks on threads; the calling thread is one of them."""
    found = Found()
    job = _Job(directory, how, Pace(how) if how.bytes_per_s else None, found)
    queue = iter(tasks)

    def work() -> None:
        size = DISK_PIECE_BYTES if how.from_disk else PIECE_BYTES
        try:
            with _buffer(size) as piece:
                while True:
                    with found.lock:
                        task = next(queue, None)
                        stop = found.crash is not None or (how.first_only and found.problems)
                    if stop or task is None:
                        break
                    _TaskReader(job, task, piece).read()
        except BaseException as error:  # noqa: BLE001  # raised again by the calling thread
            found.crash = error

    count = min(how.count_threads(), len(tasks))
    threads = [threading.Thread(target=work, name=f"verify-{i}", daemon=True) for i in range(count - 1)]
    for thread in threads:
        thread.start()
    work()
    for thread in threads:
        thread.join()  # none waits for longer than one piece takes to read, or asks `should_stop`
    if found.crash is not None:
        raise found.crash
    return found


def _buffer(size: int) -> memoryview:
    """Return memory that begins on a huge page, and is of huge pages where the kernel has them.

    Reads past the page cache need a page boundary.  Of small pages each is an entry of its own in the disk's list of
    where to put what it reads: one disk gave 1.1 GiB/s into those, and 3.0 into huge ones.
    """
    memory = mmap.mmap(-1, size + _HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if size >= _HUGE:
        with contextlib.suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    begin = -ctypes.addressof(ctypes.c_char.from_buffer(memory)) % _HUGE
    return memoryview(memory)[begin : begin + size]


@dataclass(frozen=True, slots=True)
class _Job:
    """What all tasks of a verification share."""

    directory: Path
    how: Reading
    pace: Pace | None
    found: Found


class Pace:
    """A limit on bytes per second, for all threads together."""

    def __init__(self, how: Reading) -> None:
        assert how.bytes_per_s is not None
        self._per_s, self._should_stop = how.bytes_per_s, how.should_stop
        self._lock = threading.Lock()
        self._free_at = time.monotonic()

    def wait(self, count: int) -> None:
        """Wait until `count` more bytes may be read."""
        with self._lock:
            begin = max(self._free_at, time.monotonic())
            self._free_at = begin + count / self._per_s
        while (left := begin - time.monotonic()) > 0 and not self._should_stop():
            time.sleep(min(left, _PAUSE_S))


class _TaskReader:
    """One task in one thread."""

    def __init__(self, job: _Job, task: Task, piece: memoryview) -> None:
        self._directory, self._path = job.directory, job.directory / task.name
        self._task, self._piece = task, piece
        self._how, self._pace, self._found = job.how, job.pace, job.found
        self._descriptor = -1
        self._direct = False

    def read(self) -> None:
        """Compare the chunks; problems go to `found`."""
        task, done = self._task, 0
        try:
            self._open(direct=self._how.from_disk and task.entry.chunk_bytes % _ALIGNED == 0)
        except OSError as error:
            self._found.add(task.name, task.first, f"{self._path}: cannot be opened: {error.strerror}")
            return
        try:
            for chunk in range(task.first, task.last):
                problem, count = self._chunk(chunk)
                done += count
                if problem:
                    self._found.add(task.name, chunk, f"{self._path}: {problem}")
                    if self._how.first_only or self._how.should_stop():
                        break
        finally:
            os.close(self._descriptor)
            with self._found.lock:
                self._found.bytes_read += done

    def _open(self, *, direct: bool) -> None:
        if direct:
            try:
                self._descriptor, self._direct = self._descriptor_of(os.O_DIRECT), True
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
            else:
                return
        self._descriptor, self._direct = self._descriptor_of(0), False
        self._drop_cached()

    def _descriptor_of(self, flags: int) -> int:
        return open_descriptor(self._path, within=self._directory, flags=flags)

    def _drop_cached(self) -> None:
        """Let the kernel forget clean pages, so that they are read again; it may keep some."""
        if self._how.from_disk:
            entry = self._task.entry
            first, last = self._task.first * entry.chunk_bytes, self._task.last * entry.chunk_bytes
            os.posix_fadvise(self._descriptor, first, last - first, os.POSIX_FADV_DONTNEED)

    def _chunk(self, index: int) -> tuple[str | None, int]:
        entry = self._task.entry
        start = at = index * entry.chunk_bytes
        end = min(start + entry.chunk_bytes, entry.bytes)
        digest = xxhash.xxh3_128()
        while at < end:
            if self._how.should_stop():
                return f"verification was stopped at byte {at}", at - start
            if self._pace is not None:
                self._pace.wait(min(len(self._piece), end - at))
            try:
                count = self._read_piece(at, end)
            except OSError as error:
                return f"cannot be read at byte {at}: {error.strerror}", at - start
            if not count:
                return f"ends at byte {at} of {entry.bytes}", at - start
            digest.update(self._piece[:count])
            at += count
            self._how.on_read(count)
        if digest.hexdigest() != entry.chunks[index]:
            return f"bytes of chunk {index} (from byte {start}) are wrong", end - start
        if len(entry.chunks) == 1 and entry.xxh3_128 != entry.chunks[0]:
            return "its digest does not match the manifest", end - start
        return None, end - start

    def _read_piece(self, at: int, end: int) -> int:
        """Read up to `end`; returns how many bytes of it are there."""
        wanted = min(len(self._piece), end - at)
        if self._direct:
            whole = -(-wanted // _ALIGNED) * _ALIGNED  # the last read may ask for more than there is
            try:
                return min(wanted, os.preadv(self._descriptor, [self._piece[:whole]], at))
            except OSError as error:
                if error.errno != errno.EINVAL:  # of a file system that wants another alignment
                    raise
            os.close(self._descriptor)
            self._open(direct=False)
        return os.preadv(self._descriptor, [self._piece[:wanted]], at)
