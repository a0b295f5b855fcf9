"""Reading every byte of a checkpoint once: CRC32s of archives, SHA-256s of the framework, and our own digests.

Memory is bounded by the number of threads and by an archive's directory.
"""

from __future__ import annotations

import bisect
import functools
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
from stepkeeper.frameworks.first_sight import Record as Sighting
from stepkeeper.frameworks.framework import Contents, Kind, Part
from stepkeeper.frameworks.tree import ReadError, Tree
from stepkeeper_trainer.formats.reading import Pace, Reading

PIECE_BYTES = 512 * 1024  # read and hashed at once: fits the cache of a core
BESIDE_BYTES = 8 * 1024 * 1024  # of a file from this size on, SHA-256 is computed on a thread of its own
SPLIT_BYTES = 32 * 1024 * 1024  # a file of several of these is read by several threads; its digest is that of theirs
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
    split = {part.name for part in wanted if _is_split(tree, part, before)}
    with ThreadPoolExecutor(how.count_threads(), thread_name_prefix="verify") as pool:
        futures = [pool.submit(_file, tree, part, how, pace) for part in wanted if part.name not in split]
        large = {part.name: _file(tree, part, how, pace, pool) for part in wanted if part.name in split}
        small = iter(futures)
        results = {part.name: large[part.name] if part.name in split else next(small).result() for part in wanted}
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
            notes.append("was written again since its first verification: its digests were recorded again")
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


def _is_split(tree: Tree, part: Part, before: Sighting | None) -> bool:
    """Tell whether several threads read one file: not where its digest of before, or SHA-256, is that of one pass."""
    seen = before.files.get(part.name) if before is not None else None
    status = tree.files.get(part.name)
    large = status is not None and status.st_size >= 2 * SPLIT_BYTES
    return large and part.sha256 is None and (seen is None or seen.is_split)


def _file(
    tree: Tree, part: Part, how: Reading, pace: Pace | None, pool: ThreadPoolExecutor | None = None
) -> _FileResult:
    """Read a file; with a pool, which must not be the calling thread's own, its pieces on all of its threads."""
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
        result.checksums = sum(1 for record in records if record.crc) + (part.sha256 is not None)
        if how.from_disk:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        sha256 = ""
        if pool is None:
            reader = _Reader(descriptor, records, pace)
            digest, sha256 = reader.read(0, before.st_size, sha256=part.sha256 is not None), reader.sha256
            ranges = [reader.found]
        else:
            ranges = _in_ranges(descriptor, records, before.st_size, pace, pool)
            digest = f"{SPLIT_BYTES}:{xxhash.xxh3_128_hexdigest(b''.join(each.digest for each in ranges))}"
        result.bytes_read = sum(each.bytes_read for each in ranges)
        wrong = _wrong(records, ranges)
        after = os.fstat(descriptor)
        if result.problem:
            pass
        elif _fact(before) != _fact(after) or _fact(before) != _fact(tree.files[part.name]):
            result.problem, result.unread = "changed while it was read", True
        elif result.bytes_read != before.st_size:
            result.problem = f"ends at byte {result.bytes_read} of {before.st_size}"
        elif wrong:
            result.problem = _damage(wrong)
        elif part.sha256 is not None and sha256 != part.sha256:
            result.problem = "its SHA-256 is not the recorded one"
        result.status = after
        result.seen = Seen(after.st_ino, after.st_size, after.st_mtime_ns, after.st_ctime_ns, digest)
    except (ArchiveError, OSError) as error:
        result.unread = not isinstance(error, ArchiveError)
        result.problem = f"cannot be read: {error.strerror}" if isinstance(error, OSError) else str(error)
    finally:
        os.close(descriptor)
    return result


def _damage(wrong: list[Record]) -> str:
    more = f" (and {len(wrong) - 1} more records)" if len(wrong) > 1 else ""
    return f"its record {wrong[0].name[:80]!r} at byte {wrong[0].start} is damaged: its CRC32 is wrong{more}"


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


@dataclass(slots=True)
class _Range:
    """What was found in some bytes of a file."""

    digest: bytes = b""
    bytes_read: int = 0
    crcs: list[tuple[int, int, int]] = field(default_factory=list)  # number of a record, CRC32 and size of its part


def _in_ranges(
    descriptor: int, records: list[Record], size: int, pace: Pace | None, pool: ThreadPoolExecutor
) -> list[_Range]:
    """Read a file on the threads of a pool.  Raises OSError."""

    def read(start: int) -> _Range:
        reader = _Reader(descriptor, records, pace)
        reader.read(start, min(start + SPLIT_BYTES, size))
        return reader.found

    return list(pool.map(read, range(0, size, SPLIT_BYTES)))


def _wrong(records: list[Record], ranges: list[_Range]) -> list[Record]:
    """Return the records whose bytes have another CRC32 than they should."""
    found: dict[int, int] = {}
    for number, crc, length in itertools.chain.from_iterable(each.crcs for each in ranges):
        found[number] = crc if number not in found else combined(found[number], crc, length)
    return [records[number] for number, crc in found.items() if crc != records[number].crc]


class _Reader:
    """Reads bytes of a file in a row, and computes the CRC32 of each record's part in them on the way."""

    def __init__(self, descriptor: int, records: list[Record], pace: Pace | None) -> None:
        self._descriptor, self._pace, self._records = descriptor, pace, records
        self._number = self._crc = self._length = 0  # of the record at hand
        self._sha256: Any = None
        self.found = _Range()

    @property
    def sha256(self) -> str:
        return self._sha256.hexdigest() if self._sha256 is not None else ""

    def read(self, start: int, end: int, *, sha256: bool = False) -> str:
        """Return the digest of some bytes.  Raises OSError."""
        digest = xxhash.xxh3_128()
        self._sha256 = hashlib.sha256() if sha256 else None
        self._number = bisect.bisect_left(self._records, start, key=lambda record: record.start + record.length)
        if self._sha256 is None or end - start < BESIDE_BYTES:
            self._read(start, end, digest.update, self._sha256.update if self._sha256 is not None else None)
        else:
            with ThreadPoolExecutor(1, thread_name_prefix="sha256") as thread:
                self._read(start, end, digest.update, _Beside(thread, self._sha256.update))
        self._close()
        self.found.digest = digest.digest()
        return digest.hexdigest()

    def _read(self, at: int, end: int, *updates: Callable[[memoryview], object] | None) -> None:
        wanted = [update for update in updates if update is not None]
        buffers = [memoryview(bytearray(min(PIECE_BYTES, max(1, end - at)))) for _ in range(2)]
        for buffer in itertools.cycle(buffers):
            if at >= end:
                break
            if self._pace is not None:
                self._pace.wait(min(len(buffer), end - at))
            count = os.preadv(self._descriptor, [buffer[: end - at]], at)
            if not count:
                break
            piece = buffer[:count]
            for update in wanted:
                update(piece)
            self._compute(piece, at)
            at += count
            self.found.bytes_read += count

    def _compute(self, piece: memoryview, at: int) -> None:
        end = at + len(piece)
        while self._number < len(self._records) and self._records[self._number].start < end:
            record = self._records[self._number]
            last = record.start + record.length
            part = piece[max(record.start - at, 0) : min(last, end) - at]
            if record.crc:
                self._crc, self._length = _crc32(part, self._crc), self._length + len(part)
            if last > end:
                break
            self._close()

    def _close(self) -> None:
        """Note the part of the record at hand that was read, and turn to the next one."""
        if self._number < len(self._records) and self._records[self._number].crc:
            part = (self._number, self._crc, self._length)
            if self._length or not self._records[self._number].length:
                self.found.crcs.append(part)
        self._number, self._crc, self._length = self._number + 1, 0, 0


_POLYNOMIAL = 0xEDB88320  # of CRC32, the lowest power first


def _times(one: int, other: int) -> int:
    """Return the product of two polynomials modulo that of CRC32."""
    product = 0
    for bit in range(31, -1, -1):
        if one >> bit & 1:
            product ^= other
        other = other >> 1 ^ _POLYNOMIAL if other & 1 else other >> 1
    return product


@functools.cache
def _behind(length: int) -> int:
    """Return what so many bytes behind others multiply the CRC32 of those by."""
    power, square = 1 << 31, 1 << 23  # x**0, and x**8: one byte
    while length:
        if length & 1:
            power = _times(power, square)
        square, length = _times(square, square), length >> 1
    return power


def combined(first: int, second: int, length: int) -> int:
    """Return the CRC32 of two texts in a row, of their own ones and the length of the second.

    >>> combined(zlib.crc32(b"step"), zlib.crc32(b"keeper"), 6) == zlib.crc32(b"stepkeeper")
    True
    """
    return _times(first, _behind(length)) ^ second
