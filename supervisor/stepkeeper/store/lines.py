"""Lines of files that somebody else writes, may have torn, or wrote to hurt: from either end.

Memory stays small whatever the file holds: a line beyond the limit is cut, and its rest passed over.
Only plain files are read: a link, a device or a pipe in their place is refused.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from stepkeeper.redaction import redact
from stepkeeper_trainer.formats.plain import fresh

LINE_BYTES_MAX = 1024 * 1024
BLOCK_BYTES = 64 * 1024


def open_plain(path: Path) -> BinaryIO:
    """Open a plain file for reading.

    Raises:
        OSError: it is missing, no plain file, or may not be read.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    file = os.fdopen(descriptor, "rb")
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "not a plain file", str(path))
    return file


def read_small(path: Path, bytes_max: int = LINE_BYTES_MAX) -> bytes:
    """Return the content of a small plain file.

    Raises:
        OSError: as `open_plain`, or it is larger than `bytes_max`.
    """

    def read() -> bytes:
        with open_plain(path) as file:
            return file.read(bytes_max + 1)

    data = fresh(read)
    if len(data) > bytes_max:
        raise OSError(errno.EFBIG, f"more than {bytes_max} bytes", str(path))
    return data


def forwards(file: BinaryIO) -> Iterator[bytes]:
    """Yield the lines without their ends, oldest first."""
    while line := file.readline(LINE_BYTES_MAX):
        rest = line
        while rest and not rest.endswith(b"\n"):
            rest = file.readline(LINE_BYTES_MAX)
        yield line.removesuffix(b"\n")


def backwards(file: BinaryIO) -> Iterator[bytes]:
    """Yield the lines without their ends, newest first; of one beyond the limit, its end."""
    position = file.seek(0, os.SEEK_END)
    tail = b""  # of the line that begins before `position`
    is_first = True
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
            tail = (pieces[0] + tail)[-LINE_BYTES_MAX:]
    if tail or not is_first:
        yield tail


def encode(record: msgspec.Struct) -> bytes:
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
