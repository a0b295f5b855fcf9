"""CRC-32 of tensors' bytes, as zip archives have it: by ISA-L where that is installed, else by zlib.

`pip install isal` makes it five to eight times faster, and it is most of what a save computes.
"""

from __future__ import annotations

import importlib
import struct
import zlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

_CRC = struct.Struct("<I")
_HELD_BYTES = 5 * 1024  # up to which the interpreter is held
_SMALL_BYTES = 64 * 1024


def _find_crc32() -> Callable[[Any, int], int]:
    try:
        found: Callable[[Any, int], int] = importlib.import_module("isal.isal_zlib").crc32
    except ImportError:
        return zlib.crc32
    return found if found(b"123456789", 0) == zlib.crc32(b"123456789") else zlib.crc32


_crc32 = _find_crc32()


def crc32(data: memoryview, before: int = 0) -> int:
    """Return the CRC-32 of bytes that follow some whose CRC-32 is `before`.

    Of more than 5 KiB both libraries let the interpreter go, and then wait to get it back, up to a switch interval
    (5 ms) if training is busy in Python. For a small tensor that would be a thousand times the work.
    """
    if not _HELD_BYTES < len(data) <= _SMALL_BYTES:
        return _crc32(data, before)
    for at in range(0, len(data), _HELD_BYTES):
        before = _crc32(data[at : at + _HELD_BYTES], before)
    return before


def put_crc(buffer: memoryview, first: int, second: int, crc: int) -> None:
    """Write a tensor's CRC-32 to the two places of its archive where it belongs."""
    _CRC.pack_into(buffer, first, crc)
    _CRC.pack_into(buffer, second, crc)
