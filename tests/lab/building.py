"""What is built once on a machine and kept for later: by one process at a time, where nobody else can write."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.lab.faults import LabError


@contextmanager
def locked(home: Path) -> Iterator[None]:
    """Let one process build at a time, in a directory that is ours and nobody else can write."""
    home.mkdir(mode=0o755, exist_ok=True)
    status = home.lstat()
    if status.st_uid != os.getuid() or status.st_mode & 0o022 or home.is_symlink():
        raise LabError(f"{home} is not ours alone (owner {status.st_uid}, mode {status.st_mode:o}): remove it")
    home.chmod(0o755)
    with (home / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
