"""Opening files that anybody may have put there: plain ones only, and without waiting for a pipe's other end.

What another node has replaced a moment ago may be stale here (ESTALE): a network file system still takes the name for
the file of before, which is gone, until its cache is a few seconds older.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, TypeVar

T = TypeVar("T")
STALE_PAUSES_S = (0.0, 0.1, 0.4, 1.0, 2.0, 3.0)  # longer than attributes of a new file are kept, by default
FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK


def open_plain(path: Path) -> BinaryIO:
    """Open a file for reading.

    Raises:
        FileNotFoundError: there is none.
        OSError: it cannot be opened, or is a link, a directory, a pipe or the like.
    """
    descriptor = os.open(path, FLAGS)
    plain = False
    try:
        plain = stat.S_ISREG(os.fstat(descriptor).st_mode)
    finally:
        if not plain:
            os.close(descriptor)
    if not plain:
        raise OSError(errno.EINVAL, "not a plain file", str(path))
    return os.fdopen(descriptor, "rb")


def read_plain(path: Path) -> bytes:
    """Return the content of a file.

    Raises:
        FileNotFoundError: there is none.
        OSError: as `open_plain`, or it cannot be read.
    """

    def read() -> bytes:
        with open_plain(path) as file:
            return file.read()

    return fresh(read)


def fresh(read: Callable[[], T]) -> T:
    """Return what opens and reads a file; it is called again, for some seconds, as long as the file is stale here.

    Raises:
        OSError: it cannot be read, or stays stale.
    """
    for pause_s in STALE_PAUSES_S:
        try:
            return read()
        except OSError as error:
            if error.errno != errno.ESTALE:
                raise
        time.sleep(pause_s)
    return read()
