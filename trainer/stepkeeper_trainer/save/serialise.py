"""One tensor as `torch.save` writes it, without calling it: a frame of ready bytes around the tensor's own.

`torch.save` makes a small zip archive of each tensor.  Archives of one type and shape differ only in the
data and its CRC-32, so a frame is made once, laid around the tensor's place in the staging arena, and per
save only two numbers are written into it: many small tensors then cost next to nothing, and training is
not held up by the interpreter lock.  `tests/trainer/test_serialise.py` compares the bytes with torch's own.
"""

from __future__ import annotations

import io
import math
import pickle
import struct
import zlib
from collections import OrderedDict
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

ALIGNMENT = 64  # of the data within the archive, torch's own
_UINT32_MAX = 0xFFFFFFFF
_LOCAL = struct.Struct("<4sHHHHHIIIHH")
_CENTRAL = struct.Struct("<4sHHHHHHIIIHHHHHII")
_DESCRIPTOR = struct.Struct("<4sIII")
_DESCRIPTOR_64 = struct.Struct("<4sIQQ")
_END_64 = struct.Struct("<4sQHHIIQQQQ")
_LOCATOR_64 = struct.Struct("<4sIQI")
_END = struct.Struct("<4sHHHHIIH")
_UTF_8, _SIZES_FOLLOW = 0x0800, 0x0008
_SERIALIZATION_ID = b"0" * 40  # telemetry of torch's; nothing reads it back


@dataclass(frozen=True, slots=True)
class Frame:
    """The bytes before and after the data; `crc_at` are places in `tail` where its CRC-32 belongs."""

    head: bytes
    tail: bytes
    data_bytes: int
    crc_at: tuple[int, int]


@lru_cache(maxsize=65536)
def frame(dtype: torch.dtype, shape: tuple[int, ...]) -> Frame:
    """Return the frame for a dense, contiguous tensor."""
    data_bytes = math.prod(shape) * dtype.itemsize
    archive = _Archive()
    archive.add("archive/data.pkl", _pickled(dtype, shape))
    archive.add("archive/.format_version", b"1")
    archive.add("archive/.storage_alignment", str(ALIGNMENT).encode())
    archive.add("archive/byteorder", b"little")
    head, index = archive.open("archive/data/0", data_bytes)
    archive.add("archive/version", b"3\n")
    archive.add("archive/.data/serialization_id", _SERIALIZATION_ID)
    return archive.close(head, index, data_bytes)


class _Archive:
    """A zip archive of stored entries, one of them with its data left out."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._at = 0
        self._entries: list[tuple[bytes, int, int, int]] = []  # name, CRC, bytes, where it begins

    def add(self, name: str, data: bytes) -> None:
        """Append an entry."""
        crc = zlib.crc32(data)
        self._begin(name, crc, len(data))
        self._put(data)
        self._put(_DESCRIPTOR.pack(b"PK\x07\x08", crc, len(data), len(data)))

    def open(self, name: str, size: int) -> tuple[int, int]:
        """Begin the entry whose data is elsewhere; return how many parts stand before it, and its index."""
        self._begin(name, 0, size)
        split = len(self._parts)
        self._at += size
        if not size:  # torch leaves the descriptor out where there is nothing to describe
            return split, len(self._entries) - 1
        large = size >= _UINT32_MAX
        descriptor = _DESCRIPTOR_64 if large else _DESCRIPTOR
        self._put(descriptor.pack(b"PK\x07\x08", 0, size, size))
        return split, len(self._entries) - 1

    def close(self, split: int, index: int, data_bytes: int) -> Frame:
        """Append the central directory."""
        tail_from = sum(len(part) for part in self._parts[:split])
        directory_at = self._at
        crc_at = 0
        for number, (name, crc, size, begin) in enumerate(self._entries):
            extra = b""
            if size >= _UINT32_MAX:
                extra += struct.pack("<QQ", size, size)
            if begin >= _UINT32_MAX:
                extra += struct.pack("<Q", begin)
            if extra:
                extra = struct.pack("<HH", 1, len(extra)) + extra
            if number == index:
                crc_at = self._at + 16 - data_bytes - tail_from
            short = min(size, _UINT32_MAX)
            self._put(
                _CENTRAL.pack(
                    b"PK\x01\x02", 0, 0, _flags(size), 0, 0, 0, crc, short, short, len(name), len(extra), 0, 0, 0, 0,
                    min(begin, _UINT32_MAX),
                )
                + name
                + extra
            )  # fmt: skip
        count, size = len(self._entries), self._at - directory_at
        end_at = self._at
        self._put(_END_64.pack(b"PK\x06\x06", 44, 0x31E, 45, 0, 0, count, count, size, directory_at))
        self._put(_LOCATOR_64.pack(b"PK\x06\x07", 0, end_at, 1))
        short = min(directory_at, _UINT32_MAX)
        self._put(_END.pack(b"PK\x05\x06", 0, 0, count, count, min(size, _UINT32_MAX), short, 0))
        tail = b"".join(self._parts[split:])
        first = 4 if data_bytes else crc_at
        return Frame(b"".join(self._parts[:split]), tail, data_bytes, (first, crc_at))

    def _begin(self, name: str, crc: int, size: int) -> None:
        encoded = name.encode()
        begin = self._at
        extra = b""
        if size >= _UINT32_MAX or begin >= _UINT32_MAX:
            sizes = struct.pack("<QQ", 0, 0) if size >= _UINT32_MAX else b""
            sizes += struct.pack("<Q", begin) if begin >= _UINT32_MAX else b""
            extra = struct.pack("<HH", 1, len(sizes)) + sizes
        start = begin + _LOCAL.size + len(encoded) + len(extra) + 4
        padding = -start % ALIGNMENT
        filler = b"FB" + struct.pack("<H", padding) + b"Z" * padding
        self._entries.append((encoded, crc, size, begin))
        self._put(
            _LOCAL.pack(b"PK\x03\x04", 0, _flags(size), 0, 0, 0, 0, 0, 0, len(encoded), len(extra + filler))
            + encoded
            + extra
            + filler
        )

    def _put(self, data: bytes) -> None:
        self._parts.append(data)
        self._at += len(data)


def _flags(size: int) -> int:
    return _UTF_8 | (_SIZES_FOLLOW if size else 0)


class _Storage:
    """Stands for a storage of so many elements (bytes, where it has no type of its own)."""

    def __init__(self, kind: type, count: int) -> None:
        self.kind, self.count = kind, count


class _Tensor:
    """Pickled as a tensor is; torch's own functions for that are pinned by a test."""

    def __init__(self, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        self._dtype, self._shape = dtype, shape

    def __reduce__(self) -> tuple[Any, ...]:
        count = math.prod(self._shape)
        strides = _strides(self._shape)
        kind = torch.storage._dtype_to_storage_type_map().get(self._dtype)  # noqa: SLF001  # pinned by a test
        # Private names of torch's, pinned by a test.
        if self._dtype in torch.storage._new_dtypes():  # noqa: SLF001
            storage = _Storage(torch.UntypedStorage, count * self._dtype.itemsize)
            typed: tuple[Any, ...] = (storage, 0, self._shape, strides, False, OrderedDict(), self._dtype)
            return torch._utils._rebuild_tensor_v3, typed  # noqa: SLF001
        storage = _Storage(getattr(torch, str(kind)), count)
        return torch._utils._rebuild_tensor_v2, (storage, 0, self._shape, strides, False, OrderedDict())  # noqa: SLF001


class _Pickler(pickle.Pickler):
    def persistent_id(self, value: Any) -> Any:
        if isinstance(value, _Storage):
            return ("storage", value.kind, "0", "cpu", value.count)
        return None


def _pickled(dtype: torch.dtype, shape: tuple[int, ...]) -> bytes:
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=2).dump(_Tensor(dtype, shape))
    return buffer.getvalue()


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(1, size)
    return tuple(reversed(strides))
