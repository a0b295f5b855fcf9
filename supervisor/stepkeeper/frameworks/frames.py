"""The frames of zstd in which DCP may compress an item: their blocks lead from one to the next up to the item's end.

That finds what was cut, or never reached the disk.  The bytes in a block are not decompressed: Python has no zstd
before 3.14.  By RFC 8878.
"""

from __future__ import annotations

import os

_MAGIC = b"\x28\xb5\x2f\xfd"
_SKIPPED = range(0x184D2A50, 0x184D2A60)  # magic numbers of frames that hold no data
_HEADER_BYTES_MAX = 18
_DICTIONARY_BYTES = (0, 1, 2, 4)
_RAW, _RLE, _COMPRESSED = 0, 1, 2
_CHECKSUM_BYTES = 4
_BLOCKS_MAX = 8_000_000  # of 128 KiB at most, decompressed: a terabyte


def problem(descriptor: int, start: int, length: int) -> str:
    """Return what is wrong with the frames at a place in a file; empty: nothing.  Raises OSError."""
    at, end = start, start + length
    while at < end:
        found = _frame(descriptor, at, end)
        if isinstance(found, str):
            return f"its compressed item at byte {start} is damaged: {found}"
        at = found
    return ""


def _frame(descriptor: int, at: int, end: int) -> int | str:
    """Return where a frame ends, or what is wrong with it."""
    head = os.pread(descriptor, _HEADER_BYTES_MAX, at)
    if head[:4] != _MAGIC:
        if len(head) >= 8 and int.from_bytes(head[:4], "little") in _SKIPPED:  # noqa: PLR2004 - magic number and size
            after = at + 8 + int.from_bytes(head[4:8], "little")
            return after if after <= end else "a frame is cut"
        return f"there is no frame at byte {at}"
    if len(head) < 5:  # noqa: PLR2004 - magic number and descriptor
        return "a frame is cut"
    flags = head[4]
    single = flags >> 5 & 1
    size_bytes = (single, 2, 4, 8)[flags >> 6]
    at += 5 + (1 - single) + _DICTIONARY_BYTES[flags & 3] + size_bytes
    last, blocks = False, 0
    while not last:
        block = os.pread(descriptor, 3, at)
        if len(block) < 3 or at + 3 > end:  # noqa: PLR2004 - a block's header
            return "its last block is missing"
        header = int.from_bytes(block, "little")
        last, kind, size = bool(header & 1), header >> 1 & 3, header >> 3
        blocks += 1
        if kind not in (_RAW, _RLE, _COMPRESSED) or not (size or last):  # zeros look like empty blocks
            return f"there is no block at byte {at}"
        if blocks > _BLOCKS_MAX:
            return f"it has more than {_BLOCKS_MAX} blocks"
        at += 3 + (1 if kind == _RLE else size)
    at += _CHECKSUM_BYTES if flags >> 2 & 1 else 0
    return at if at <= end else "a block is cut"
