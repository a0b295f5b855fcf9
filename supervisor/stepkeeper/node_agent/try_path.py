"""Tries whether files can be made in a directory.  A program of its own: on a hung mount it hangs, and only it.

    python -I -S try_path.py DIRECTORY

writes one JSON object: {"free": bytes, "size": bytes, "took_s": seconds} or {"problem": "..."}.  Imports as little as
can be, so that it also runs while much else does not work.
"""

from __future__ import annotations

import errno
import json
import os
import sys
import time

CONTENT = b"stepkeeper tries whether this file system can be written\n"


def attempt(directory: str) -> dict[str, float | str]:
    """Make a file, write it through to storage and remove it."""
    began = time.monotonic()
    # a new name each time: what stands there already may be anybody's
    path = os.path.join(directory, f".stepkeeper-check-{os.uname().nodename}-{os.urandom(4).hex()}")
    doing = "stat"
    try:
        os.stat(directory)
        doing = "create a file"
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            doing = "write"
            os.write(descriptor, CONTENT)
            doing = "fsync"
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
            os.unlink(path)
        took_s = time.monotonic() - began
        doing = "statvfs"
        status = os.statvfs(directory)
    except OSError as error:
        name = errno.errorcode.get(error.errno or 0, "unknown")
        return {"problem": f"cannot {doing}: {error.strerror} ({name})"}
    return {
        "free": float(status.f_bavail * status.f_frsize),
        "size": float(status.f_blocks * status.f_frsize),
        "took_s": took_s,
    }


if __name__ == "__main__":
    print(json.dumps(attempt(sys.argv[1])))  # noqa: T201 - what the parent reads
