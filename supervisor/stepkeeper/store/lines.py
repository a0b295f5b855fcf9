"""Lines of files that somebody else writes, may have torn, or wrote to hurt: from either end.

Memory stays small whatever the file holds: a line beyond the limit is cut, and its rest passed over.  So is time:
what is passed over has a limit too, since a file of a terabyte without a line end may take no room on a disk.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from typing import Any, BinaryIO

import msgspec

from stepkeeper.redaction import redact

LINE_BYTES_MAX = 1024 * 1024
BLOCK_BYTES = 64 * 1024
PASSED_OVER_MAX = 256 * 1024 * 1024  # of one file


def forwards(file: BinaryIO) -> Iterator[bytes]:
    """Yield the lines without their ends, oldest first.

    Raises:
        OSError: it cannot be read, or holds next to no line.
    """
    passed_over = 0
    while line := file.readline(LINE_BYTES_MAX):
        rest = line
        while rest and not rest.endswith(b"\n"):
            rest = file.readline(LINE_BYTES_MAX)
            passed_over = _pass_over(file, passed_over + len(rest))
        yield line.removesuffix(b"\n")


def backwards(file: BinaryIO) -> Iterator[bytes]:
    """Yield the lines without their ends, newest first; of one beyond the limit, its end.

    Raises:
        OSError: it cannot be read, or holds next to no line.
    """
    position = file.seek(0, os.SEEK_END)
    tail = b""  # of the line that begins before `position`
    is_first = True
    passed_over = 0
    while position > 0:
        count = min(BLOCK_BYTES, position)
        position -= count
        file.seek(position)
        pieces = file.read(count).split(b"\n")
        if len(pieces) > 1:
            last = pieces[-1] + tail
            if last or not is_first:  # what follows the last line end is no line
                yield last
            yield from reversed(pieces[1:-1])
            is_first = False
            tail = pieces[0]
        else:
            whole = pieces[0] + tail
            tail = whole[-LINE_BYTES_MAX:]
            passed_over = _pass_over(file, passed_over + len(whole) - len(tail))
    if tail or not is_first:
        yield tail


def _pass_over(file: BinaryIO, count: int) -> int:
    if count > PASSED_OVER_MAX:
        raise OSError(errno.EFBIG, f"{PASSED_OVER_MAX} bytes of it are no lines: it is damaged", file.name)
    return count


def encode(record: msgspec.Struct | dict[str, Any]) -> bytes:
    """Return a record as one line of JSON, without its end.  Never raises for what strings hold.

    A file name that is no UTF-8 reaches us with surrogates, which JSON cannot hold: they become `?`.  What looks like
    a secret is hidden, whoever's words it stands in.
    """
    try:
        data = msgspec.json.encode(record)
    except UnicodeEncodeError:
        return msgspec.json.encode(_harmless(msgspec.to_builtins(record)))
    text = data.decode()
    return data if redact(text) == text else msgspec.json.encode(_harmless(msgspec.to_builtins(record)))


def _harmless(value: Any) -> Any:
    match value:
        case str():
            return redact(value.encode(errors="replace").decode())
        case dict():
            return {key: _harmless(item) for key, item in value.items()}
        case list() | tuple():
            return [_harmless(item) for item in value]
        case _:
            return value
