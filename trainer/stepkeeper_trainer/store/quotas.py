"""What quotas leave us in a directory: of the user, of the group that files get there, and of the directory's project.

The kernel tells a project's quota to root only.  Nobody else misses it: ext4 and XFS give the project's room as that of
the file system, to whoever asks for that in a directory whose project is inherited.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import shutil
import stat
import struct
import subprocess
from dataclasses import dataclass
from pathlib import Path

LUSTRE_WITHIN_S = 3.0  # for each question
_QUOTACTL_FD = 443  # the same number on every architecture since Linux 5.14
_GET_QUOTA = 0x800007
_BLOCK_BYTES = 1024  # of quota limits
_LIMITS_VALID = 1 | 2 | 4 | 8  # block limits, space, inode limits, inodes
_ANSWER_BYTES = 72
_GET_ATTRIBUTES = 0x801C581F  # FS_IOC_FSGETXATTR: flags, extent size, extents, project, and more
_ATTRIBUTES_BYTES = 28


@dataclass(frozen=True, slots=True)
class Room:
    """What is left in one place, and by whose account; None: unlimited, or not told."""

    account: str
    bytes_left: int | None
    files_left: int | None


@dataclass(frozen=True, slots=True)
class Account:
    """By whose limits a file that is made in a directory counts."""

    kind: int  # as the kernel numbers them
    number: int

    @property
    def option(self) -> str:
        """Of `lfs quota`."""
        return ("-u", "-g", "-p")[self.kind]

    def __str__(self) -> str:
        """Name its quota."""
        return f"the quota of {('user', 'group', 'project')[self.kind]} {self.number}"


def ask(directory: Path) -> list[Room]:
    """Return what is limited there; quotas that cannot be asked for are left out.

    Raises:
        OSError: the directory is not there.
    """
    found = []
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        accounts = _accounts(descriptor)
        for account in accounts:
            answer = _ask_kernel(descriptor, account)
            if answer is not None and (one := decode_quota(answer, str(account))):
                found.append(one)
    finally:
        os.close(descriptor)
    return found + _lustre_quotas(directory, accounts)


def _accounts(descriptor: int) -> list[Account]:
    """Return by whose limits a file counts that we make in an open directory."""
    status = os.fstat(descriptor)
    group = status.st_gid if status.st_mode & stat.S_ISGID else os.getegid()
    project = _project(descriptor)
    return [Account(0, os.geteuid()), Account(1, group), *([Account(2, project)] if project else [])]


def _project(descriptor: int) -> int:
    """Return the project of an open directory; 0 where it has none, or its file system knows of none."""
    attributes = bytearray(_ATTRIBUTES_BYTES)
    with contextlib.suppress(OSError):  # no such thing here
        fcntl.ioctl(descriptor, _GET_ATTRIBUTES, attributes)
    return int(struct.unpack_from("=4I", attributes)[3])


def _ask_kernel(descriptor: int, account: Account) -> bytes | None:
    """Ask the kernel (ext4, XFS, f2fs); most file systems and older kernels have no answer."""
    answer = ctypes.create_string_buffer(_ANSWER_BYTES)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(_QUOTACTL_FD, descriptor, (_GET_QUOTA << 8) | account.kind, account.number, answer) != 0:
        return None
    return answer.raw


def decode_quota(answer: bytes, account: str) -> Room | None:
    """Read the kernel's `struct if_dqblk`; None where nothing is limited."""
    hard, soft, used, files_hard, files_soft, files, _, _, valid = struct.unpack("=8QI", answer[:68])
    if valid & _LIMITS_VALID != _LIMITS_VALID:
        return None
    one = Room(account, _left((hard or soft) * _BLOCK_BYTES, used), _left(files_hard or files_soft, files))
    return one if one.bytes_left is not None or one.files_left is not None else None


def _left(limit: int, used: int) -> int | None:
    return max(0, limit - used) if limit else None


def _lustre_quotas(directory: Path, accounts: list[Account]) -> list[Room]:
    """Ask `lfs quota`, where there is one: the kernel's own call does not know Lustre."""
    lfs = shutil.which("lfs")
    if lfs is None or _kind_of(directory) != "lustre":
        return []
    found = []
    for account in accounts:
        command = [lfs, "quota", "-q", account.option, str(account.number), str(directory)]
        try:
            said = subprocess.run(command, capture_output=True, text=True, timeout=LUSTRE_WITHIN_S, check=False)
        except (OSError, subprocess.TimeoutExpired):
            continue  # quotas are asked for as well as they can be
        if one := parse_lfs_quota(said.stdout, str(account)):
            found.append(one)
    return found


def parse_lfs_quota(text: str, account: str) -> Room | None:
    """Read the line of `lfs quota -q`: file system, kbytes, quota, limit, grace, files, quota, limit, grace.

    >>> parse_lfs_quota("  /lustre  900  0  1000  -  7*  5  10  6d", "bob")
    Room(account='bob', bytes_left=102400, files_left=3)
    """
    words = text.split()
    if len(words) != 9:  # noqa: PLR2004 - as the header has
        return None
    try:
        used, soft, hard, files, files_soft, files_hard = (int(words[at].rstrip("*")) for at in (1, 2, 3, 5, 6, 7))
    except ValueError:
        return None
    return Room(account, _left((hard or soft) * 1024, used * 1024), _left(files_hard or files_soft, files))


def _kind_of(directory: Path) -> str:
    """Return the type of the file system that holds a directory; empty where it cannot be told."""
    wanted = os.stat(directory).st_dev
    major_minor = f"{os.major(wanted)}:{os.minor(wanted)}"
    with open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as file:
        for line in file:
            if line.split()[2] == major_minor:
                return line.partition(" - ")[2].split()[0]
    return ""
