"""Reading every byte of a checkpoint once: CRC32s of archives, SHA-256s of the framework, and our own digests.

Memory is bounded by the number of threads and by an archive's directory.
"""

from __future__ import annotations

import hashlib
import importlib
import itertools
import os
import time
import zlib
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import xxhash

from stepkeeper.frameworks import archives, frames, inert
from stepkeeper.frameworks.archives import ArchiveError, Record
from stepkeeper.frameworks.first_sight import FirstSight, Seen, compare, unchanged
from stepkeeper.frameworks.framework import Contents, Kind, Part
from stepkeeper.frameworks.tree import ReadError, Tree
from stepkeeper_trainer.formats.reading import Pace, Reading

PIECE_BYTES = 512 * 1024  # read and hashed at once: fits the cache of a core
BESIDE_BYTES = 8 * 1024 * 1024  # of a file from this size on, SHA-256 is computed on a thread of its own
NAMES_KEPT = 100
NO_CHECKSUMS = "has no checksums of its own: its bytes are compared with those of the first verification only"


def _fastest_crc32() -> Callable[[Any, int], int]:
    """Return zlib's CRC32, or that of isal where it is installed: several times as fast."""
    try:
        found: Callable[[Any, int], int] = importlib.import_module("isal.isal_zlib").crc32
    except ImportError:
        return zlib.crc32
    return found


_crc32 = _fastest_crc32()


@dataclass(frozen=True, slots=True)
class Deep:
    """What reading the bytes of a checkpoint found."""

    problems: tuple[str, ...]
    notes: tuple[str, ...]
    bytes_read: int
    bytes_known: int = 0  # not read now: found right before, and unchanged since
    unread: bool = False  # a problem is that bytes could not be read, or changed meanwhile: they are perhaps right


@dataclass(slots=True)
class _FileResult:
    problem: str = ""
    seen: Seen | None = None
    status: os.stat_result | None = None
    bytes_read: int = 0
    checksums: int = 0
    refused: list[str] = field(default_factory=list)  # names of code in its pickles
    unread: bool = False


def verify(contents: Contents, how: Reading, sight: FirstSight, *, cached: bool) -> Deep:
    """Read the parts of a checkpoint whose names and sizes are right; remember their digests if all is right.

    Args:
        contents: of a checkpoint that is complete.
        how: threads and rate of the reading.
        sight: digests of before.
        cached: files that were right before, and cannot have changed since, are not read again.
    """
    checkpoint, tree = contents.tree.path, contents.tree
    began_at = time.time()
    before = sight.record(checkpoint)
    known: dict[str, Seen] = {}
    if cached and before is not None:
        found = ((name, unchanged(before, name, tree.files[name])) for name in contents.parts if name in tree.files)
        known = {name: seen for name, seen in found if seen is not None}
    wanted = [part for name, part in sorted(contents.parts.items()) if name not in known]
    pace = Pace(how) if how.bytes_per_s else None
    with ThreadPoolExecutor(how.count_threads(), thread_name_prefix="verify") as pool:
        results = dict(
            zip(
                (part.name for part in wanted), pool.map(lambda part: _file(tree, part, how, pace), wanted), strict=True
            )
        )
    problems = [f"{name}: {result.problem}" for name, result in results.items() if result.problem]
    notes = _without_checksums(wanted, results)
    if refused := sorted({name for result in results.values() for name in result.refused}):
        more = f" and {len(refused) - 3} more" if len(refused) > 3 else ""  # noqa: PLR2004
        notes.append(f"names classes of its own, which were not loaded: {', '.join(refused[:3])}{more}")
    now = {name: (tree.files[name], seen.xxh3_128) for name, seen in known.items()}
    now |= {name: (r.status, r.seen.xxh3_128) for name, r in results.items() if r.seen and r.status}
    if before is not None and not problems:
        compared = compare(before, now)
        problems += compared.problems
        if compared.rewritten:
            notes.append("was written anew since its first verification: its digests were recorded again")
    if not problems:
        seen = known | {name: result.seen for name, result in results.items() if result.seen}
        sight.remember(checkpoint, seen, before=before, read_at=began_at)
    if sight.problem:
        notes.append(sight.problem)
    read = sum(result.bytes_read for result in results.values())
    unread = any(result.unread for result in results.values())
    return Deep(tuple(problems), tuple(notes), read, sum(seen.bytes for seen in known.values()), unread)


def _without_checksums(parts: list[Part], results: Mapping[str, _FileResult]) -> list[str]:
    silent = [part.name for part in parts if part.kind is not Kind.PLAIN and not results[part.name].checksums]
    shown = ", ".join(silent[:3]) + (f" and {len(silent) - 3} more" if len(silent) > 3 else "")  # noqa: PLR2004
    return [f"{shown}: {NO_CHECKSUMS}"] if silent else []


def _file(tree: Tree, part: Part, how: Reading, pace: Pace | None) -> _FileResult:
    result = _FileResult()
    try:
        descriptor = tree.descriptor(part.name)
    except ReadError as error:
        result.problem, result.unread = str(error).removeprefix(f"{part.name}: "), True
        return result
    try:
        before = os.fstat(descriptor)
        records = _records(descriptor, part, before.st_size)
        damaged = (frames.problem(descriptor, start, length) for start, length in part.compressed)
        result.problem = next(filter(None, damaged), "") or _hostile(descriptor, records, result.refused)
        result.checksums = sum(1 for record in records if record.crc)
        if part.sha256 is not None:
            result.checksums += 1
        if how.from_disk:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        reader = _Reader(descriptor, records, part.sha256 is not None, pace)
        digest = reader.read(before.st_size)
        result.bytes_read = reader.at
        after = os.fstat(descriptor)
        if result.problem:
            pass
        elif _fact(before) != _fact(after) or _fact(before) != _fact(tree.files[part.name]):
            result.problem, result.unread = "changed while it was read", True
        elif reader.at != before.st_size:
            result.problem = f"ends at byte {reader.at} of {before.st_size}"
        elif reader.wrong:
            more = f" (and {len(reader.wrong) - 1} more records)" if len(reader.wrong) > 1 else ""
            wrong = reader.wrong[0]
            result.problem = (
                f"its record {wrong.name[:80]!r} at byte {wrong.start} is damaged: its CRC32 is wrong{more}"
            )
        elif part.sha256 is not None and reader.sha256 != part.sha256:
            result.problem = "its SHA-256 is not the recorded one"
        result.status = after
        result.seen = Seen(after.st_ino, after.st_size, after.st_mtime_ns, after.st_ctime_ns, digest)
    except (ArchiveError, OSError) as error:
        result.unread = not isinstance(error, ArchiveError)
        result.problem = f"cannot be read: {error.strerror}" if isinstance(error, OSError) else str(error)
    finally:
        os.close(descriptor)
    return result


def _hostile(descriptor: int, records: list[Record], refused: list[str]) -> str:
    """Say what the pickles of a file name that runs programs; other names of code go to `refused`."""
    known: set[bytes] = set()  # tensors of one shape have the same pickle
    for record in records:
        if record.name != "data.pkl":
            continue
        if record.length > inert.PICKLE_BYTES_MAX:
            return f"its pickle has {record.length} bytes, more than {inert.PICKLE_BYTES_MAX}: not read"
        data = os.pread(descriptor, record.length, record.start)
        digest = hashlib.sha256(data).digest()
        if digest in known:
            continue
        known.add(digest)
        try:
            found = inert.read(data)
        except inert.InertError as error:
            return str(error)
        if found.hostile:
            return f"names code that runs programs: {', '.join(map(str, found.hostile[:3]))}: nothing was executed"
        refused += [name for name in map(str, found.refused) if name not in refused][:NAMES_KEPT]
    return ""


def _fact(status: os.stat_result) -> tuple[int, int, int, int]:
    return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _records(descriptor: int, part: Part, size: int) -> list[Record]:
    if part.kind is Kind.ARCHIVE:
        return archives.read_directory(descriptor, 0, size)
    records: list[Record] = []
    for start, length in part.items:
        if os.pread(descriptor, len(archives.MAGIC), start) == archives.MAGIC:
            records += archives.read_directory(descriptor, start, length)
    end = 0
    for record in records:
        if record.start < end:
            raise ArchiveError("damaged: two of its records share bytes")
        end = record.start + record.length
    return records


class _Beside:
    """Computes a digest on another thread; a piece may be overwritten once the next one was taken."""

    def __init__(self, thread: ThreadPoolExecutor, update: Callable[[memoryview], object]) -> None:
        self._thread, self._update = thread, update
        self._before: Future[object] | None = None

    def __call__(self, piece: memoryview) -> None:
        if self._before is not None:
            self._before.result()
        self._before = self._thread.submit(self._update, piece)


class _Reader:
    """Reads a file from its first byte to its last one, and compares the CRC32 of each record on the way."""

    def __init__(self, descriptor: int, records: list[Record], sha256: bool, pace: Pace | None) -> None:  # noqa: FBT001
        self._descriptor, self._pace = descriptor, pace
        self._records = iter(record for record in records if record.crc)
        self._record = next(self._records, None)
        self._crc = 0
        self._sha256 = hashlib.sha256() if sha256 else None
        self.wrong: list[Record] = []
        self.at = 0

    @property
    def sha256(self) -> str:
        return self._sha256.hexdigest() if self._sha256 is not None else ""

    def read(self, size: int) -> str:
        """Return the digest of the file.  Raises OSError."""
        digest = xxhash.xxh3_128()
        if self._sha256 is None or size < BESIDE_BYTES:
            self._read(size, digest.update, self._sha256.update if self._sha256 is not None else None)
        else:
            with ThreadPoolExecutor(1, thread_name_prefix="sha256") as thread:
                self._read(size, digest.update, _Beside(thread, self._sha256.update))
        return digest.hexdigest()

    def _read(self, size: int, *updates: Callable[[memoryview], object] | None) -> None:
        wanted = [update for update in updates if update is not None]
        buffers = [memoryview(bytearray(min(PIECE_BYTES, max(1, size)))) for _ in range(2)]
        for buffer in itertools.cycle(buffers):
            if self.at >= size:
                break
            if self._pace is not None:
                self._pace.wait(min(len(buffer), size - self.at))
            count = os.preadv(self._descriptor, [buffer[: size - self.at]], self.at)
            if not count:
                break
            piece = buffer[:count]
            for update in wanted:
                update(piece)
            self._compare(piece)
            self.at += count

    def _compare(self, piece: memoryview) -> None:
        end = self.at + len(piece)
        while (record := self._record) is not None and record.start < end:
            last = record.start + record.length
            begin = max(record.start, self.at)
            self._crc = _crc32(piece[begin - self.at : min(last, end) - self.at], self._crc)
            if last > end:
                break
            if self._crc != record.crc:
                self.wrong.append(record)
            self._record, self._crc = next(self._records, None), 0
