"""The archives that `torch.save` writes: a zip without compression, whose CRC32s torch writes and never compares.

Read with bounded memory, by the end of the archive and its directory.  A CRC of 0 means that none was computed.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass

DIRECTORY_BYTES_MAX = 64 * 1024 * 1024
_TAIL_BYTES = 22 + 20 + 56 + 1024
_END = struct.Struct("<4s4H2LH")
_LOCATOR = struct.Struct("<4sLQL")
_END64 = struct.Struct("<4sQ2H2L4Q")
_ENTRY = struct.Struct("<4s4B4H3L5H2L")
_LOCAL = struct.Struct("<4s5H3L2H")
_NONE32 = 0xFFFFFFFF
_STORED = 0
_ENCRYPTED = 1
MAGIC = b"PK\x03\x04"


class ArchiveError(ValueError):
    """It is no whole archive of `torch.save`."""


@dataclass(frozen=True, slots=True)
class Record:
    """One record of an archive."""

    name: str  # without the archive's own first directory
    start: int  # byte of the file
    length: int
    crc: int


def read_directory(descriptor: int, start: int, length: int) -> list[Record]:
    """Return the records of an archive at a place of a file, in the order of their bytes.

    Raises:
        ArchiveError: it is torn, compressed, or says what cannot be.
        OSError: it cannot be read.
    """
    tail_at = max(start, start + length - _TAIL_BYTES)
    tail = _pread(descriptor, tail_at, start + length - tail_at)
    end_at = tail.rfind(b"PK\x05\x06")
    if end_at < 0 or len(tail) - end_at < _END.size:
        raise ArchiveError("torn: the end of its archive is missing")
    _, disk, _, _, count, size, offset, comment = _END.unpack_from(tail, end_at)
    if end_at + _END.size + comment != len(tail):
        raise ArchiveError("torn: its archive does not end where the file ends")
    limit = tail_at + end_at
    locator_at = end_at - _LOCATOR.size
    if locator_at >= 0 and tail[locator_at : locator_at + 4] == b"PK\x06\x07":
        _, _, end64_offset, _ = _LOCATOR.unpack_from(tail, locator_at)
        data = _pread(descriptor, start + end64_offset, _END64.size) if end64_offset + _END64.size <= length else b""
        if len(data) < _END64.size or data[:4] != b"PK\x06\x06":
            raise ArchiveError("damaged: its archive's end leads elsewhere")
        _, _, _, _, disk, _, _, count, size, offset = _END64.unpack(data)
        limit = start + end64_offset
    if disk:
        raise ArchiveError("damaged: its archive claims several disks")
    if size > DIRECTORY_BYTES_MAX:
        raise ArchiveError(f"its archive's directory would have {size} bytes: not read")
    if start + offset + size > limit or count * _ENTRY.size > size:
        raise ArchiveError("damaged: its archive's directory leads outside")
    records = _entries(_pread(descriptor, start + offset, size), count)
    return _placed(descriptor, start, offset, records)


@dataclass(frozen=True, slots=True)
class _Entry:
    name: str
    header: int
    length: int
    crc: int


def _entries(data: bytes, count: int) -> list[_Entry]:
    entries: list[_Entry] = []
    at = 0
    for _ in range(count):
        if at + _ENTRY.size > len(data):
            raise ArchiveError("damaged: its archive's directory is too short")
        fields = _ENTRY.unpack_from(data, at)
        flags, method = fields[5], fields[6]
        crc, packed, plain = fields[9:12]
        name_bytes, extra_bytes, comment_bytes = fields[12:15]
        header = fields[18]
        if fields[0] != b"PK\x01\x02":
            raise ArchiveError("damaged: its archive's directory is none")
        body = at + _ENTRY.size
        name = data[body : body + name_bytes].decode("utf-8", "surrogateescape")
        if method != _STORED or flags & _ENCRYPTED:
            raise ArchiveError(
                f"its record {name[:80]!r} is compressed or encrypted, as torch.save writes none: not read"
            )
        extra = data[body + name_bytes : body + name_bytes + extra_bytes]
        plain, packed, header = _wide(extra, plain, packed, header)
        if plain != packed:
            raise ArchiveError(f"damaged: its record {name[:80]!r} has two sizes")
        entries.append(_Entry(name, header, plain, crc))
        at = body + name_bytes + extra_bytes + comment_bytes
    return entries


def _wide(extra: bytes, plain: int, packed: int, header: int) -> tuple[int, int, int]:
    """Return sizes and place with the 64-bit ones where the 32-bit ones do not suffice."""
    at = 0
    while at + 4 <= len(extra):
        kind, length = struct.unpack_from("<2H", extra, at)
        if kind == 1:
            wide = extra[at + 4 : at + 4 + length]
            values = [int.from_bytes(wide[i : i + 8], "little") for i in range(0, len(wide) // 8 * 8, 8)]
            needed = [value == _NONE32 for value in (plain, packed, header)]
            if sum(needed) > len(values):
                raise ArchiveError("damaged: a size is missing in its archive")
            taken = iter(values)
            plain, packed, header = (
                next(taken) if wanted else value for wanted, value in zip(needed, (plain, packed, header), strict=True)
            )
            break
        at += 4 + length
    return plain, packed, header


def _placed(descriptor: int, start: int, directory: int, entries: list[_Entry]) -> list[Record]:
    """Find where the bytes of records begin; none overlaps another one or the directory."""
    records, free_from = [], 0
    names: set[str] = set()
    top = {entry.name.partition("/")[0] for entry in entries}
    for entry in sorted(entries, key=lambda each: each.header):
        if entry.header < free_from or entry.header + _LOCAL.size > directory:
            raise ArchiveError(f"damaged: its record {entry.name[:80]!r} lies in another one")
        local = _LOCAL.unpack(_pread(descriptor, start + entry.header, _LOCAL.size))
        data_at = entry.header + _LOCAL.size + local[9] + local[10]
        if local[0] != MAGIC or data_at + entry.length > directory:
            raise ArchiveError(f"damaged: its record {entry.name[:80]!r} is not where its directory says")
        free_from = data_at + entry.length
        name = entry.name.partition("/")[2] if len(top) == 1 else entry.name
        if name in names:
            raise ArchiveError(f"damaged: two records are called {name[:80]!r}")
        names.add(name)
        records.append(Record(name, start + data_at, entry.length, entry.crc))
    return records


def _pread(descriptor: int, start: int, length: int) -> bytes:
    data = os.pread(descriptor, length, start) if start >= 0 else b""
    if len(data) != length:
        raise ArchiveError("torn: it is shorter than it says")
    return data
