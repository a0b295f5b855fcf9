"""Opening files that anybody may have put there: plain ones only, and without waiting for a pipe's other end."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

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
    with open_plain(path) as file:
        return file.read()
