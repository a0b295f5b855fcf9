"""Who uses a directory on a node: each process that does holds it, by a lock that the kernel takes back from the dead.

So what nobody holds is left over, whatever has ended those who did: no clock, no other node and no Slurm is asked.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
from pathlib import Path

from stepkeeper_trainer.tiers.directory import give_up

LOOK_EVERY_S = 0.05
_descriptors: dict[int, os.stat_result] = {}  # of directories that this process holds


def _let_go_in_child() -> None:
    """Close what a forked child inherits: a data loader may outlive the rank that holds a directory."""
    for descriptor, directory in _descriptors.items():
        with contextlib.suppress(OSError):  # somebody has closed it, and the number may be another file's
            if os.path.samestat(os.fstat(descriptor), directory):
                os.close(descriptor)
    _descriptors.clear()


os.register_at_fork(after_in_child=_let_go_in_child)


def hold(path: Path, held: int | None = None) -> int:
    """Hold a directory while the descriptor that is returned is open; `held` is the one of before, if there is one.

    Raises:
        FileNotFoundError: it is not there, or is being removed just now.
        OSError: it cannot be opened, or locked.
    """
    if held is not None and _leads_to(path, held):
        return held
    descriptor = _open(path)
    try:
        ours = _lock(descriptor, fcntl.LOCK_SH) and _leads_to(path, descriptor)
    except OSError:
        let_go(descriptor)
        raise
    if not ours:
        let_go(descriptor)
        raise FileNotFoundError(errno.ENOENT, "is being removed", str(path))
    if held is not None:
        let_go(held)
    return descriptor


def let_go(descriptor: int) -> None:
    """Hold a directory no longer, by the descriptor that `hold` returned."""
    _descriptors.pop(descriptor, None)
    os.close(descriptor)


def remove_unless_held(path: Path, held: int | None = None, *, within_s: float = 0.0) -> bool:
    """Remove a directory, unless a process holds it that does not let go in time; whether none did.

    Args:
        path: of the directory; where it is another one than was held, nothing is removed.
        held: the descriptor by which we hold it; what it holds is let go of.
        within_s: how long to wait for processes that are about to end.

    Raises:
        OSError: it cannot be opened, or locked.
    """
    descriptor = held if held is not None else _open(path)
    limit_at = time.monotonic() + within_s
    try:
        while not _lock(descriptor, fcntl.LOCK_EX):
            if time.monotonic() >= limit_at:
                return False
            time.sleep(LOOK_EVERY_S)
        if _leads_to(path, descriptor):
            give_up(path)
        return True
    finally:
        let_go(descriptor)


def _open(path: Path) -> int:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    _descriptors[descriptor] = os.fstat(descriptor)
    return descriptor


def _lock(descriptor: int, how: int) -> bool:
    try:
        fcntl.flock(descriptor, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _leads_to(path: Path, descriptor: int) -> bool:
    """Whether it is this very directory that has the name."""
    try:
        return os.path.samestat(path.lstat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False
