"""`--group-readable`: the group may read every file of the run directory, whoever of ours made it, whatever the umask.

Ranks, Slurm and the supervisor make files there, under the user's umask, which must stay: the training writes elsewhere
too.  So what is in the run directory is looked through now and then, and gets the permission.  Links are not followed.
"""

from __future__ import annotations

import contextlib
import os
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

EVERY_S = 15.0
LAST_WITHIN_S = 2.0  # the nodes are about to be given back
_IN_FLIGHT = ".tmp-"
_STEP = "step_"
_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def share(directory: Path) -> int:
    """Let the group read a directory and all that is below it and ours; return how many permissions were given.

    A step directory that the group can read is not looked through again: its files were shared before it was.

    Raises:
        OSError: the directory cannot be read; what vanishes meanwhile is no error.
    """
    descriptor = os.open(directory, _FLAGS)
    try:
        return _below(descriptor) + _allow(descriptor, os.fstat(descriptor))
    finally:
        os.close(descriptor)


def _below(descriptor: int) -> int:
    given = 0
    for name in os.listdir(descriptor):
        if name.startswith(_IN_FLIGHT):
            continue  # renamed when it is complete
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):  # replaced or removed meanwhile
            found = os.stat(name, dir_fd=descriptor, follow_symlinks=False)
            if stat.S_ISDIR(found.st_mode):
                if not (name.startswith(_STEP) and _shared(found)):
                    given += _directory(descriptor, name)
            elif stat.S_ISREG(found.st_mode) and not _shared(found):
                given += _file(descriptor, name)
    return given


def _directory(parent: int, name: str) -> int:
    descriptor = os.open(name, _FLAGS, dir_fd=parent)
    try:
        return _below(descriptor) + _allow(descriptor, os.fstat(descriptor))
    finally:
        os.close(descriptor)


def _file(parent: int, name: str) -> int:
    try:
        descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=parent)
    except OSError:
        return 0  # a link or something else by now, or not ours to read
    try:
        return _allow(descriptor, os.fstat(descriptor))
    finally:
        os.close(descriptor)


def _needed(found: os.stat_result) -> int:
    return 0o050 if stat.S_ISDIR(found.st_mode) else 0o040


def _shared(found: os.stat_result) -> bool:
    needed = _needed(found)
    return found.st_mode & needed == needed


def _allow(descriptor: int, found: os.stat_result) -> int:
    if _shared(found) or found.st_uid != os.getuid():
        return 0
    os.fchmod(descriptor, stat.S_IMODE(found.st_mode) | _needed(found))
    return 1


@contextlib.contextmanager
def kept(directory: Path, *, wanted: bool, every_s: float = EVERY_S) -> Iterator[None]:
    """Share a run directory while the block runs, and a last time after it; do nothing where it is not wanted."""
    if not wanted:
        yield
        return
    ending = threading.Event()

    def work() -> None:
        last = False
        while not last:
            last = ending.wait(every_s)
            with contextlib.suppress(OSError):  # storage that is away: the next pass, or the next attempt's, tells
                share(directory)

    thread = threading.Thread(target=work, name="sharing", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ending.set()
        thread.join(LAST_WITHIN_S)
