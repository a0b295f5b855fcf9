"""TCP ports for what tests start: no two tests of this machine, in whatever process, are given the same one."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import random
import socket
import tempfile
from pathlib import Path

PORTS = range(10_000, 32_000)  # below the ephemeral ones, which srun and any other program may take at any time
TRIES = 1000
_dice = random.SystemRandom()  # trainings seed Python's own in this process: several would be given the same ports
_own: set[int] = set()
_path = Path(tempfile.gettempdir(), f"stepkeeper-test-ports-{os.getuid()}")


def reserve(count: int = 1) -> int:
    """Return the first of some neighbouring ports on which nobody listens; they are this process's until it ends."""
    for _ in range(TRIES):
        first = _dice.randrange(PORTS.start, PORTS.stop - count)
        if all(_take(port) for port in range(first, first + count)):
            return first
    raise RuntimeError(f"found no {count} free neighbouring ports in {PORTS}")


def _take(port: int) -> bool:
    if port in _own:
        return False
    try:
        fcntl.lockf(_locks(), fcntl.LOCK_EX | fcntl.LOCK_NB, 1, port)  # a byte a port; the kernel lets go of the dead's
    except OSError:
        return False  # another process has it
    _own.add(port)
    with contextlib.closing(socket.socket()) as sock:
        try:
            sock.bind(("", port))
        except OSError:
            return False  # somebody who knows nothing of this
    return True


@functools.cache
def _locks() -> int:
    return os.open(_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
