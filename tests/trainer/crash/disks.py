"""File systems of their own whose faults begin and end on request; each needs root, and the kernel's support."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import subprocess
import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import ClassVar

EXT4_IOC_SHUTDOWN = 0x8004587D
_NO_FLUSH = b"\2\0\0\0"
MIB = 1024 * 1024


class NotHereError(Exception):
    """This machine cannot make such a file system."""


class Disk(ABC):
    """A file system, mounted at `at`."""

    name: ClassVar[str]
    says: ClassVar[tuple[str, ...]]  # one of these is what the failed save names
    heals: ClassVar[bool] = True  # for the process that met the fault
    below: ClassVar[str] = "."  # of the run's root: what is on it

    def __init__(self, at: Path, backing: Path) -> None:
        """Mount it; `backing` is a directory for what it needs.  Raises NotHereError."""
        self.at, self.backing = at, backing
        at.mkdir(parents=True, exist_ok=True)
        backing.mkdir(parents=True, exist_ok=True)
        try:
            self.make()
        except Exception:
            for place in (at, backing):  # of two mounts the first may be there
                if os.path.ismount(place):
                    unmount(place)
            raise

    @abstractmethod
    def make(self) -> None:
        """Mount it."""

    @abstractmethod
    def strike(self) -> None:
        """Begin the fault."""

    @abstractmethod
    def mend(self) -> None:
        """End it."""

    def again(self) -> None:
        """Have a next process find it well."""
        self.mend()

    def remove(self) -> None:
        """Unmount it."""
        unmount(self.at)
        if os.path.ismount(self.backing):
            unmount(self.backing)


class Full(Disk):
    """No byte is free."""

    name, says = "ENOSPC", ("No space left",)

    def make(self) -> None:
        _tmpfs(self.at, "size=16m")

    def strike(self) -> None:
        _fill(self.at / "filler")

    def mend(self) -> None:
        (self.at / "filler").unlink(missing_ok=True)


class NoInodes(Disk):
    """Bytes are free, and no name can be made."""

    name, says = "ENOSPC (inodes)", ("No space left",)

    def make(self) -> None:
        _tmpfs(self.at, "size=64m,nr_inodes=400")

    def strike(self) -> None:
        (self.at / "filler").mkdir()
        try:
            for number in range(500):
                (self.at / "filler" / str(number)).touch()
        except OSError as error:
            assert error.errno == errno.ENOSPC, error  # noqa: PT017
            return
        raise AssertionError("there were inodes enough")

    def mend(self) -> None:
        shutil.rmtree(self.at / "filler", ignore_errors=True)


class ReadOnly(Disk):
    """Mounted again, for reading only; the kernel refuses while a file is open for writing."""

    name, says, below = "read-only remount", ("Read-only file system",), "run/checkpoints"

    def make(self) -> None:
        _tmpfs(self.at, "size=64m")

    def strike(self) -> None:
        """Begin the fault.  Raises BlockingIOError where it cannot begin now."""
        done = _run("mount", "-o", "remount,ro", str(self.at))
        if done.returncode:
            raise BlockingIOError(done.stderr)

    def mend(self) -> None:
        _run("mount", "-o", "remount,rw", str(self.at))


class Thin(Disk):
    """A thin volume whose pool is full: what was written is lost when it is synced."""

    # the kernel says either, and the second where the pool has told the reason
    name, says = "lost writes", ("Input/output error", "No space left")

    def make(self) -> None:
        _tmpfs(self.backing, "size=40m")
        _loop(self.backing / "image", self.at, "mkfs.ext2", "-E", "lazy_itable_init=0", "-I", "256", size=512 * MIB)

    def strike(self) -> None:
        _fill(self.backing / "filler")

    def mend(self) -> None:
        (self.backing / "filler").unlink(missing_ok=True)


class Gone(Disk):
    """The file system shuts down, as after its device was lost: everything fails until it is mounted again."""

    name, says, heals = "EIO", ("Input/output error",), False

    def make(self) -> None:
        _loop(self.backing / "image", self.at, "mkfs.ext4", size=64 * MIB)

    def strike(self) -> None:
        descriptor = os.open(self.at, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.ioctl(descriptor, EXT4_IOC_SHUTDOWN, _NO_FLUSH)
        except OSError as error:
            raise NotHereError(f"the file system cannot be shut down: {error}") from error
        finally:
            os.close(descriptor)

    def mend(self) -> None:
        """Only a mount helps."""

    def again(self) -> None:
        """Mount a copy: a lab's nodes keep what was mounted when they began, so the file system that is gone."""
        unmount(self.at)
        image, copy = self.backing / "image", self.backing / "copy"
        _must("cp", "--sparse=always", str(image), str(copy))
        copy.replace(image)
        _mount("-o", "loop", str(image), str(self.at))


class Quota(Disk):
    """The quota is used up, on a disk that has room."""

    name, says = "EDQUOT", ("Disk quota exceeded",)

    def make(self) -> None:
        if shutil.which("mkfs.btrfs") is None:
            raise NotHereError("mkfs.btrfs is not installed: install btrfs-progs")
        _loop(self.backing / "image", self.at, "mkfs.btrfs", "-f", size=300 * MIB)
        _must("btrfs", "quota", "enable", str(self.at))
        _must("btrfs", "qgroup", "limit", "24m", str(self.at))

    def strike(self) -> None:
        _fill(self.at / "filler", errno.EDQUOT)
        assert os.statvfs(self.at).f_bavail * os.statvfs(self.at).f_frsize > MIB, "it is no full disk"

    def mend(self) -> None:
        (self.at / "filler").unlink(missing_ok=True)


DISKS: tuple[type[Disk], ...] = (Full, NoInodes, ReadOnly, Thin, Gone, Quota)


def _fill(path: Path, until: int = errno.ENOSPC) -> None:
    """Take every byte."""
    with path.open("wb", buffering=0) as file:
        for size in (MIB, 4096):
            try:
                while file.write(bytes(size)) == size:
                    pass
            except OSError as error:
                assert error.errno == until, error  # noqa: PT017


def _tmpfs(at: Path, options: str) -> None:
    _mount("-t", "tmpfs", "-o", options, "tmpfs", str(at))


def _loop(image: Path, at: Path, make: str, *options: str, size: int) -> None:
    if shutil.which(make) is None:
        raise NotHereError(f"{make} is not on the PATH")
    with image.open("wb") as file:
        file.truncate(size)
    made = _run(make, "-q", *options, str(image))
    if made.returncode:
        raise NotHereError(f"{make}: {made.stderr.strip()}")
    _mount("-o", "loop", str(image), str(at))


def _mount(*arguments: str) -> None:
    done = _run("mount", *arguments)
    if done.returncode:
        raise NotHereError(f"nothing can be mounted here: {done.stderr.strip()}")


def unmount(at: Path) -> None:
    """Unmount a file system, as soon as nobody has a file of it open any more."""
    limit_at = time.monotonic() + 60
    while (done := _run("umount", str(at))).returncode:
        assert time.monotonic() < limit_at, done.stderr
        time.sleep(0.05)


def _must(*command: str) -> None:
    done = _run(*command)
    assert done.returncode == 0, done.stderr


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
