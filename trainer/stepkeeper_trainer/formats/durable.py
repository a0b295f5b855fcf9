"""Writing files that must outlive the process: the only place that fsyncs and renames small files."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import time
from pathlib import Path
from typing import TYPE_CHECKING

from stepkeeper_trainer.formats.plain import naming, open_directory

if TYPE_CHECKING:
    pass

STALE_S = 3600.0  # nobody takes so long to write a small file
_TEMPORARY = re.compile(r"\.(?:[\w.-]+\.json|\.tiers-id)\.[a-z0-9_]{8}")  # as `write_atomically` names them


def fsync_directory(path: Path) -> None:
    """Make renames and new names below `path` durable.  Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with naming(path):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_directories(path: Path, *, mode: int = 0o777) -> None:
    """Make a directory and those above it that are missing, and make their names durable.  Raises OSError."""
    missing = [each for each in (path, *path.parents) if not each.is_dir()]
    os.makedirs(path, mode=mode, exist_ok=True)
    for each in missing:
        with contextlib.suppress(PermissionError):  # what may be entered and not read cannot be synced by us
            fsync_directory(each.parent)


def write_all(descriptor: int, data: bytes) -> None:
    """Write every byte of `data`: `os.write` may take fewer on a nearly full disk.  Raises OSError."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def write_new(path: Path, data: bytes, *, mode: int = 0o666, sync: bool = True) -> None:
    """Make a file that is not there yet, and its bytes durable with `sync`; its name is not so by this.

    Raises:
        OSError: the file is not there, unless another one was before.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
    try:
        with naming(path):
            try:
                write_all(descriptor, data)
                if sync:
                    os.fsync(descriptor)
            finally:
                os.close(descriptor)  # NFS tells here that the disk is full
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(path)
        raise


def write_atomically(
    path: Path,
    data: bytes,
    *,
    mode: int = 0o600,
    owner: tuple[int, int] | None = None,
    within: Path | None = None,
    name_durable: bool = True,
) -> None:
    """Replace `path` by `data`: after a crash it holds the old bytes or the new ones, never a mixture.

    The temporary file stands beside `path`, with a name of its own, so two writers cannot mix.  With `within` no
    symbolic link below that directory is followed, even if another process changes it meanwhile.  Without
    `name_durable` the rename is the last act: a crash may undo it, and no error comes once others can see it.
    `owner` is a user and a group id.

    Raises:
        OSError: nothing was replaced, and the temporary file is gone; or only its name may not be durable.
    """
    directory = open_directory(path.parent, within=path.parent if within is None else within)
    try:
        with naming(path, always=True):
            _replace(directory, path.name, data, mode, owner)
            if name_durable:
                os.fsync(directory)
    finally:
        os.close(directory)


def _replace(directory: int, name: str, data: bytes, mode: int, owner: tuple[int, int] | None) -> None:
    temporary = f".{name}.{secrets.token_hex(4)}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(temporary, flags, 0o600, dir_fd=directory)
    try:
        try:
            status = os.fstat(descriptor)
            if owner is not None and owner != (status.st_uid, status.st_gid):
                os.fchown(descriptor, *owner)
            os.fchmod(descriptor, mode)
            write_all(descriptor, data)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.rename(temporary, name, src_dir_fd=directory, dst_dir_fd=directory)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):  # renamed already, or never made
            os.unlink(temporary, dir_fd=directory)
        raise


def clear_temporaries(directory: Path) -> None:
    """Remove what writers of small files of a run that were killed in `write_atomically` have left.

    One that cannot be removed now harms nothing; the next run tries again.
    """
    with contextlib.suppress(OSError):  # there is none, or it is not for us
        for name in os.listdir(directory):
            path = directory / name
            with contextlib.suppress(OSError):  # somebody was faster
                if _TEMPORARY.fullmatch(name) and time.time() - path.lstat().st_mtime > STALE_S:
                    os.unlink(path)


def append_line(path: Path, line: bytes, *, mode: int = 0o600) -> None:
    """Append one line and fsync.  A torn last line of a crashed writer is closed first, never continued.

    Raises:
        OSError: the line may be there in part; readers skip a line that does not parse.
    """
    assert b"\n" not in line, "one record is one line"
    existed = path.exists()
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, mode)
    try:
        with naming(path):
            size = os.fstat(descriptor).st_size
            torn = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
            write_all(descriptor, (b"\n" if torn else b"") + line + b"\n")
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
    if not existed:
        fsync_directory(path.parent)
