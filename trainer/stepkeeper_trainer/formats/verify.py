"""Whether a step directory is whole: complete by a look at it, and right in every byte by reading it.

A look compares names, sizes and `.metadata` (that every tensor is covered) with the manifest.  Reading is spread
over threads, in 16 MiB chunks that are hashed while they are still in the processor's cache; memory is bounded by
the number of threads.  Several nodes can read a share each.  Needs no torch, and runs nothing that it reads.
"""

from __future__ import annotations

import dataclasses
import errno
import mmap
import os
import stat
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import xxhash

from stepkeeper_trainer.formats.cache import Cache, Fact, fact
from stepkeeper_trainer.formats.manifest import MANIFEST_NAME, FileEntry, Manifest, ManifestError, read_manifest
from stepkeeper_trainer.formats.metadata import METADATA_BYTES_MAX, METADATA_NAME, MetadataError, check_coverage, parse
from stepkeeper_trainer.formats.names import parse_step_name
from stepkeeper_trainer.formats.plain import FLAGS, open_plain

if TYPE_CHECKING:
    from collections.abc import Iterator

PIECE_BYTES = 512 * 1024  # read and hashed at once: fits the cache of a core
DISK_PIECE_BYTES = 4 * 1024 * 1024  # past the page cache nobody reads ahead: the disk wants more at once
TASK_BYTES = 64 * 1024 * 1024  # read by one thread in a row, at most
TASKS_PER_THREAD = 4
THREADS_MIN, THREADS_MAX = 4, 32  # more than cores: shared storage answers many readers at once
DCP = "torch.distributed.checkpoint"
_ALIGNED = 4096  # for reads past the page cache
_PAUSE_S = 0.1


def _never() -> bool:
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
    should_stop: Callable[[], bool] = _never  # asked between pieces, by several threads
    on_read: Callable[[int], None] = _untold  # told how many bytes were read, again and again, by several threads

    def count_threads(self) -> int:
        """Return how many threads read."""
        if self.threads is not None:
            return max(1, self.threads)
        return min(THREADS_MAX, max(THREADS_MIN, len(os.sched_getaffinity(0))))


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a verification found; no problems means that every byte that was looked at is right."""

    path: Path
    problems: tuple[str, ...]
    bytes_read: int
    bytes_known: int = 0  # not read now: found right before, and unchanged since

    @property
    def ok(self) -> bool:
        """Whether nothing was wrong."""
        return not self.problems


@dataclass(frozen=True, slots=True)
class ShareVerdict:
    """What one of several readers found in its share of the bytes."""

    index: int
    of: int
    problems: tuple[str, ...]
    bytes_read: int
    manifest: str  # its digest: equal for all shares of one step directory
    seen: str  # digest over the state of its files; nodes may number the inodes of one file differently
    began_at: float  # Unix seconds


@dataclass(slots=True)
class _Look:
    """A step directory as it is now, without reading its data."""

    directory: Path
    manifest: Manifest | None
    problems: list[str]
    files: dict[str, os.stat_result]  # those of the manifest that are there with the right size
    covered: bool = True  # by `.metadata`

    def facts(self) -> dict[str, Fact]:
        assert self.manifest is not None
        return {name: fact(status, self.manifest.files[name]) for name, status in self.files.items()}


@dataclass(frozen=True, slots=True)
class _Task:
    """Some chunks of a file in a row."""

    name: str
    entry: FileEntry
    first: int
    last: int  # exclusive


@dataclass(slots=True)
class _Found:
    """Of all threads together."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    problems: dict[str, dict[int, str]] = field(default_factory=dict)  # by file, then by chunk
    bytes_read: int = 0
    crash: BaseException | None = None  # a mistake of ours: no verdict then

    def add(self, name: str, chunk: int, problem: str) -> None:
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


def verify(
    directory: Path,
    *,
    deep: bool = True,
    should_stop: Callable[[], bool] = _never,
    reading: Reading | None = None,
    cache: Cache | None = None,
) -> Verdict:
    """Compare a step directory with its manifest: missing, extra and changed files, and every byte.

    Never raises for what is wrong inside the directory: each thing is one line of `problems`.

    Args:
        directory: a step directory.
        deep: read every byte; otherwise names, sizes and coverage only.
        should_stop: asked while reading; true ends it with a problem that says so.
        reading: how to read.
        cache: what need not be read again; what is read and right goes into it.
    """
    how = reading or Reading()
    if should_stop is not _never:
        how = dataclasses.replace(how, should_stop=should_stop)
    started_at = time.time()
    look = _look(directory, cache)
    manifest = look.manifest
    if manifest is None or not deep or (how.first_only and look.problems):
        return Verdict(directory, tuple(look.problems), 0)
    facts = look.facts()
    digest = manifest.manifest_xxh3_128
    known = cache.known(digest, facts.values()) if cache is not None else set()
    unread = [name for name in look.files if facts[name] not in known]
    found = _read(directory, _tasks(manifest.files, unread, how.count_threads()), how)
    problems = look.problems + found.lines(list(manifest.files))
    if cache is not None and unread and not how.should_stop():
        after = _look_at_files(directory, manifest, [])
        right = {
            name: facts[name]
            for name in facts
            if name not in found.problems and name in after and fact(after[name], manifest.files[name]) == facts[name]
        }
        if not look.covered:
            right.pop(METADATA_NAME, None)  # its bytes are right, and what they promise is not there
        if not (how.first_only and problems):  # otherwise some were not read at all
            cache.remember(digest, right, read_at=started_at)
    bytes_known = sum(look.files[name].st_size for name in facts if facts[name] in known)
    return Verdict(directory, tuple(problems), found.bytes_read, bytes_known)


def known_right(directory: Path, cache: Cache) -> bool:
    """Whether a step directory is complete and each of its files was found right before, and is unchanged since."""
    look = _look(directory, cache)
    if look.manifest is None or look.problems:
        return False
    facts = set(look.facts().values())
    return cache.known(look.manifest.manifest_xxh3_128, facts) == facts


def unread(directory: Path, cache: Cache) -> tuple[int, int]:
    """Return how many bytes a step directory has, and how many of them `cache` does not know to be right."""
    look = _look(directory, cache)
    if look.manifest is None:
        return 0, 0
    facts = look.facts()
    known = cache.known(look.manifest.manifest_xxh3_128, facts.values())
    sizes = {name: status.st_size for name, status in look.files.items()}
    return sum(sizes.values()), sum(size for name, size in sizes.items() if facts[name] not in known)


def verify_share(directory: Path, index: int, of: int, *, reading: Reading | None = None) -> ShareVerdict:
    """Read share `index` (from 0) of `of` nearly equal ones; all of them together are a deep verification.

    A share looks at its own files only, so that many readers do not ask the file system for all files each;
    `join_shares` looks at the whole directory.
    """
    assert 0 <= index < of, f"share {index} of {of}"
    began_at = time.time()
    try:
        manifest = read_manifest(directory)
    except (ManifestError, OSError) as error:
        return ShareVerdict(index, of, (str(error),), 0, "", "", began_at)
    how = reading or Reading()
    # a file without a list of chunks cannot be read: `join_shares` says so
    files = {name: entry for name, entry in manifest.files.items() if _lists_chunks(entry)}
    tasks = _share(_tasks(files, list(files), of * how.count_threads()), index, of)
    names = list(dict.fromkeys(task.name for task in tasks))
    before, problems = _facts_of(directory, files, names)
    found = _read(directory, [task for task in tasks if task.name in before], how)
    problems += found.lines(names)
    after, _ = _facts_of(directory, files, names)
    if after != before:
        problems.append(f"{directory}: its files changed while they were read")
    digest = manifest.manifest_xxh3_128
    return ShareVerdict(index, of, tuple(problems), found.bytes_read, digest, _seen(before), began_at)


def join_shares(directory: Path, shares: list[ShareVerdict], *, cache: Cache | None = None) -> Verdict:
    """Put together what the readers of all shares found; with no problem, every byte was read and is right."""
    look = _look(directory)
    problems = list(dict.fromkeys([*look.problems, *(problem for share in shares for problem in share.problems)]))
    bytes_read = sum(share.bytes_read for share in shares)
    manifest = look.manifest
    if manifest is not None:
        if any(share.manifest != manifest.manifest_xxh3_128 for share in shares):
            problems.append(f"{directory}: the readers did not see the same manifest as there is now")
        whole = [(index, len(shares)) for index in range(len(shares))]
        expected = sum(entry.bytes for entry in manifest.files.values())
        if not problems and (sorted((s.index, s.of) for s in shares) != whole or bytes_read != expected):
            problems.append(f"{directory}: {bytes_read} of {expected} bytes were read: a share is missing")
        if cache is not None and not problems and _saw_these_files(look, shares):
            began_at = min(share.began_at for share in shares)
            cache.remember(manifest.manifest_xxh3_128, look.facts(), read_at=began_at)
    return Verdict(directory, tuple(problems), bytes_read)


def names_of_share(manifest: Manifest, index: int, of: int) -> tuple[str, ...]:
    """Return the files that a share has bytes of."""
    tasks = _share(_tasks(manifest.files, list(manifest.files)), index, of)
    return tuple(dict.fromkeys(task.name for task in tasks))


def _facts_of(directory: Path, files: dict[str, FileEntry], names: list[str]) -> tuple[dict[str, Fact], list[str]]:
    """Return the state of some files that have the right size, and what is wrong with the others."""
    facts, problems = {}, []
    for name in names:
        try:
            status = os.stat(directory / name, follow_symlinks=False)
        except OSError as error:
            problems.append(f"{directory / name}: {'missing' if error.errno == errno.ENOENT else error.strerror}")
            continue
        if not stat.S_ISREG(status.st_mode):
            problems.append(f"{directory / name}: not a plain file (links are not followed)")
        elif status.st_size != files[name].bytes:
            said = files[name].bytes
            problems.append(f"{directory / name}: has {status.st_size} bytes, the manifest says {said}")
        else:
            facts[name] = fact(status, files[name])
    return facts, problems


def _saw_these_files(look: _Look, shares: list[ShareVerdict]) -> bool:
    """Whether each reader saw the files that are there now, by inode, size and times."""
    assert look.manifest is not None
    facts = look.facts()
    return all(
        share.seen == _seen({name: facts[name] for name in names_of_share(look.manifest, share.index, share.of)})
        for share in shares
    )


# A look -----------------------------------------------------------------------------------------------------------


def _look(directory: Path, cache: Cache | None = None) -> _Look:
    """Look; a `.metadata` that `cache` remembers of this very manifest is not parsed again."""
    try:
        manifest = read_manifest(directory)
    except (ManifestError, OSError) as error:
        return _Look(directory, None, [str(error)], {})
    problems: list[str] = []
    step = parse_step_name(directory.name)
    if step is not None and manifest.step != step:
        problems.append(f"{directory}: its manifest is of step {manifest.step}")
    files = _look_at_files(directory, manifest, problems)
    uncovered: list[str] = []
    if manifest.framework == DCP and not _covered_before(manifest, files, cache):
        uncovered = _metadata_problems(directory, manifest)
    return _Look(directory, manifest, problems + uncovered, files, not uncovered)


def _covered_before(manifest: Manifest, files: dict[str, os.stat_result], cache: Cache | None) -> bool:
    status = files.get(METADATA_NAME)
    if cache is None or status is None:
        return False
    own = fact(status, manifest.files[METADATA_NAME])
    return bool(cache.known(manifest.manifest_xxh3_128, [own], own_only=True))


def _look_at_files(directory: Path, manifest: Manifest, problems: list[str]) -> dict[str, os.stat_result]:
    """Return the state of the manifest's files that have the right size; whatever else is there is a problem."""
    found = dict(_files_below(directory, problems))
    extras = sorted(found.keys() - manifest.files.keys() - {MANIFEST_NAME})
    problems.extend(f"{directory / extra}: not in the manifest" for extra in extras)
    files = {}
    for name, entry in manifest.files.items():
        status = found.get(name)
        if status is None:
            problems.append(f"{directory / name}: missing")
        elif status.st_size != entry.bytes:
            problems.append(f"{directory / name}: has {status.st_size} bytes, the manifest says {entry.bytes}")
        elif not _lists_chunks(entry):
            problems.append(f"{directory / name}: the manifest does not list its chunks")
        else:
            files[name] = status
    return files


def _lists_chunks(entry: FileEntry) -> bool:
    return entry.chunk_bytes > 0 and len(entry.chunks) == -(-entry.bytes // entry.chunk_bytes)


def _files_below(directory: Path, problems: list[str]) -> Iterator[tuple[str, os.stat_result]]:
    """Yield the relative names of plain files; anything else (a link, a socket) is a problem."""
    stack = [(str(directory), "")]
    while stack:
        at, prefix = stack.pop()
        try:
            with os.scandir(at) as entries:
                for entry in entries:
                    status = entry.stat(follow_symlinks=False)
                    if stat.S_ISDIR(status.st_mode):
                        stack.append((entry.path, f"{prefix}{entry.name}/"))
                    elif stat.S_ISREG(status.st_mode):
                        yield prefix + entry.name, status
                    else:
                        problems.append(f"{entry.path}: not a plain file (links are not followed)")
        except OSError as error:
            problems.append(f"{at}: cannot be listed: {error.strerror}")


def _metadata_problems(directory: Path, manifest: Manifest) -> list[str]:
    """Check that `.metadata` is the one that was saved, and that all it promises is in the files."""
    path = directory / METADATA_NAME
    entry = manifest.files.get(METADATA_NAME)
    if entry is None:
        return [f"{path}: not in the manifest: no tensor can be found without it"]
    if entry.bytes > METADATA_BYTES_MAX:
        return [f"{path}: {entry.bytes} bytes is more than we read at once"]
    try:
        with open_plain(path) as file:
            data = file.read(entry.bytes)
    except OSError as error:
        # one that is missing, or no plain file, is named by the look at the files
        unseen = error.errno not in (errno.ENOENT, errno.ELOOP, errno.EINVAL)
        return [f"{path}: cannot be read: {error.strerror}"] if unseen else []
    if len(data) != entry.bytes or xxhash.xxh3_128_hexdigest(data) != entry.xxh3_128:
        return [] if len(data) != entry.bytes else [f"{path}: its bytes are not what the manifest says"]
    sizes = {name: file.bytes for name, file in manifest.files.items()}
    try:
        return [f"{directory}: {problem}" for problem in check_coverage(parse(data), sizes)]
    except MetadataError as error:
        return [f"{path}: {error}"]


def _seen(facts: dict[str, Fact]) -> str:
    """Digest the state of files."""
    return xxhash.xxh3_128_hexdigest(msgspec.json.encode(sorted(facts.items())))


# Reading ----------------------------------------------------------------------------------------------------------


def _tasks(files: dict[str, FileEntry], names: list[str], threads: int = 1) -> list[_Task]:
    """Cut files into tasks: long ones, and still several for each thread."""
    total = sum(files[name].bytes for name in names)
    size = min(TASK_BYTES, total // (TASKS_PER_THREAD * threads))
    tasks = []
    for name in names:
        entry = files[name]
        at_once = max(1, size // entry.chunk_bytes)
        tasks += [
            _Task(name, entry, first, min(first + at_once, len(entry.chunks)))
            for first in range(0, len(entry.chunks), at_once)
        ]
    return tasks


def _share(tasks: list[_Task], index: int, of: int) -> list[_Task]:
    """Return the chunks of one share: all shares together have each chunk once, and bytes are split evenly."""
    total = sum(task.entry.bytes for task in tasks if task.first == 0)
    share, before = [], 0
    for task in tasks:
        size = task.entry.chunk_bytes
        own = [chunk for chunk in range(task.first, task.last) if (before + chunk * size) * of // total == index]
        if own:
            share.append(_Task(task.name, task.entry, own[0], own[-1] + 1))
        if task.last == len(task.entry.chunks):
            before += task.entry.bytes
    return share


def _read(directory: Path, tasks: list[_Task], how: Reading) -> _Found:
    """Read tasks on threads; the calling thread is one of them."""
    found = _Found()
    job = _Job(directory, how, _Pace(how) if how.bytes_per_s else None, found)
    queue = iter(tasks)

    def work() -> None:
        size = DISK_PIECE_BYTES if how.from_disk else PIECE_BYTES
        buffer = mmap.mmap(-1, size)  # on a page boundary, as reads past the page cache need it
        try:
            with memoryview(buffer) as piece:
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


@dataclass(frozen=True, slots=True)
class _Job:
    """What all tasks of a verification share."""

    directory: Path
    how: Reading
    pace: _Pace | None
    found: _Found


class _Pace:
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

    def __init__(self, job: _Job, task: _Task, piece: memoryview) -> None:
        self._path, self._task, self._piece = job.directory / task.name, task, piece
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
                self._descriptor, self._direct = os.open(self._path, FLAGS | os.O_DIRECT), True
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
            else:
                return
        self._descriptor, self._direct = os.open(self._path, FLAGS), False
        self._drop_cached()

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
