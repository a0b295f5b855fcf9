"""Whether the storage can take the next save: bytes, inodes and quota; and whether it gives back what it was given.

Nothing here raises for a bad disk: what is wrong is the answer.  Each question has a time limit, for a hung file
system answers none.  Needs no torch.

Quotas are those of the user, of the group that files get in a directory, and of the directory's project.  The kernel
tells a project's quota to root only.  Nobody else misses it: ext4 and XFS give the project's room as that of the file
system, to any account that asks in a directory whose project is inherited.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import random
import shutil
import stat
import struct
import subprocess
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import xxhash

from stepkeeper_trainer.formats.durable import fsync_directory, write_all

if TYPE_CHECKING:
    from stepkeeper_trainer.formats.manifest import Manifest
    from stepkeeper_trainer.formats.steps import Choice, StepDirectory


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
    """Return what is limited there; quotas that cannot be asked for are left out.  Raises OSError."""
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


ASK_WITHIN_S = 10.0
TEST_WITHIN_S = 120.0
TEST_BYTES = 64 * 1024 * 1024
SUSPECT_AFTER = 2  # step directories in a row whose bytes are wrong: one is bad luck
MARGIN = 1.1  # of the last save: states grow a little
MARGIN_BYTES = 64 * 1024 * 1024
TEST_PREFIX = ".tmp-storage-test."
_STALE_S = 3600.0
_PIECE_BYTES = 4 * 1024 * 1024

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Needs:
    """What the next save takes at most."""

    bytes: int
    files: int


def estimate(last: Manifest | None, *, state_bytes: int = 0, world_size: int = 1) -> Needs:
    """Estimate the next save from the last one; before the first, from the size of the state.

    Files that will be linked instead of written are counted in full: it is a bound from above.
    """
    if last is None:
        size, files = state_bytes, world_size
    else:
        size = max(state_bytes, sum(entry.bytes for entry in last.files.values()))
        files = max(world_size, len(last.files))
    return Needs(int(size * MARGIN) + MARGIN_BYTES, 2 * files + 8)  # reports, manifest and directories besides


def lacking(directory: Path, needs: Needs, *, within_s: float = ASK_WITHIN_S) -> str | None:
    """Say why a save of that size would not fit; None where it would, or where nobody can tell.

    The file system may take `within_s` to answer; a later answer is a problem of its own.
    """
    try:
        rooms = _within(lambda: room(directory), within_s)
    except _NoAnswerError:
        return f"{directory}: the file system has not answered for {within_s:g} s"
    except OSError as error:
        return f"{directory}: {error.strerror}"
    for one in rooms:
        if one.bytes_left is not None and one.bytes_left < needs.bytes:
            return f"{directory}: {one.account}: {one.bytes_left} bytes left, the save may take {needs.bytes}"
        if one.files_left is not None and one.files_left < needs.files:
            return f"{directory}: {one.account}: room for {one.files_left} more files, the save may take {needs.files}"
    return None


def room(directory: Path) -> list[Room]:
    """Return what the file system and its quotas leave us.  Quotas that cannot be asked for are left out.

    Raises:
        OSError: the directory is not there, or the file system is broken.
    """
    status = os.statvfs(directory)
    # some file systems (btrfs, many network ones) make inodes as they need them, and say 0 of 0
    files = status.f_favail if status.f_files else None
    return [Room("the file system", status.f_bavail * status.f_frsize, files), *ask(directory)]


# A dummy save -----------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class StorageTest:
    """What a dummy save found, as far as it has come."""

    bytes: int
    problem: str | None = None  # what is wrong, and in which act
    write_s: float | None = None  # written and durable
    read_s: float | None = None  # from the disk, as far as the kernel lets us
    from_disk: bool = False  # whether it did
    untrue: bool = False  # it gave back other bytes than it was given


@dataclass(slots=True)
class _Progress:
    """How far a dummy save is."""

    found: StorageTest
    act: str = "begin"
    given_up: threading.Event = field(default_factory=threading.Event)


def storage_test(directory: Path, *, size: int = TEST_BYTES, limit_s: float = TEST_WITHIN_S) -> StorageTest:
    """Save bytes that nobody needs as a checkpoint is saved, read them back from the disk, and compare.

    A file system that hangs costs `limit_s` and no more; whatever it lets us remove afterwards is removed.
    """
    found = StorageTest(size)
    progress = _Progress(found)
    try:
        _within(lambda: _test(directory, progress), limit_s)
    except _NoAnswerError:
        progress.given_up.set()
        problem = f"{directory}: hangs: to {progress.act} takes longer than {limit_s:g} s for the whole test"
        return replace(found, problem=problem)  # the thread may go on with its own
    except OSError as error:
        found.problem = f"{directory}: cannot {progress.act}: {error.strerror or error}"
    except Exception as error:  # noqa: BLE001 - a test that was not made has not passed
        found.problem = f"{directory}: cannot {progress.act}: {error!r}"
    return found


def _test(directory: Path, progress: _Progress) -> None:
    test = progress.found
    _clear_old_tests(directory)
    own = directory / f"{TEST_PREFIX}{os.getpid()}.{uuid.uuid4().hex[:8]}"
    final = own.with_name(own.name + ".renamed")
    progress.act = "make a directory"
    os.mkdir(own)
    try:
        began = time.monotonic()
        digest = _write(own / "bytes", progress)
        progress.act = "sync a directory"
        fsync_directory(own)
        progress.act = "rename"
        os.rename(own, final)
        progress.act = "sync a directory"
        fsync_directory(directory)
        test.write_s = time.monotonic() - began
        began = time.monotonic()
        progress.act = "read back"
        found, read = _read_back(final / "bytes", progress)
        test.read_s = time.monotonic() - began
        test.untrue = found != digest
        if read != test.bytes:
            test.problem = f"{directory}: gives back {read} of {test.bytes} bytes that it said were durable"
        elif found != digest:
            test.problem = f"{directory}: gives back other bytes than it was given: the storage cannot be trusted"
    finally:
        for path in (own, final):
            shutil.rmtree(path, ignore_errors=True)


def _write(path: Path, progress: _Progress) -> str:
    """Write bytes that no compression and no memory of zeros can invent; return their digest."""
    pattern = random.Random(time.time_ns()).randbytes(_PIECE_BYTES)  # noqa: S311  # no secret
    digest = xxhash.xxh3_128()
    progress.act = "create a file"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        progress.act = "write"
        for number in range(-(-progress.found.bytes // _PIECE_BYTES)):
            if progress.given_up.is_set():
                raise TimeoutError("given up")
            piece = (struct.pack("=Q", number) + pattern[8:])[: progress.found.bytes - number * _PIECE_BYTES]
            write_all(descriptor, piece)
            digest.update(piece)
        progress.act = "sync a file"
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return digest.hexdigest()


def _read_back(path: Path, progress: _Progress) -> tuple[str, int]:
    """Return digest and number of the bytes on the disk, past the page cache where that works."""
    flags = os.O_RDONLY | os.O_CLOEXEC
    try:
        descriptor, progress.found.from_disk = os.open(path, flags | os.O_DIRECT), True
    except OSError:  # no such way on this file system
        descriptor, progress.found.from_disk = os.open(path, flags), False
    digest, at = xxhash.xxh3_128(), 0
    buffer = mmap.mmap(-1, _PIECE_BYTES)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        while True:
            count = os.preadv(descriptor, [buffer], at)
            if not count:
                return digest.hexdigest(), at
            with memoryview(buffer) as view:
                digest.update(view[:count])
            at += count
    finally:
        os.close(descriptor)


def _clear_old_tests(directory: Path) -> None:
    for path in directory.glob(f"{TEST_PREFIX}*"):
        with contextlib.suppress(OSError):  # gone meanwhile
            if time.time() - path.stat().st_mtime > _STALE_S:
                shutil.rmtree(path, ignore_errors=True)


def damaged_in_a_row(choice: Choice) -> list[tuple[StepDirectory, tuple[str, ...]]]:
    """Return the newest step directories that were committed and are not what they were, with what is wrong.

    Not a save that never ended, nor a manifest that is damaged: that is no plain case.
    """
    return [(step, problems) for step, problems in choice.skipped if step.manifest is not None]


def suspicion(choice: Choice) -> str | None:
    """Say why the storage itself is suspect: the newest step directories, several in a row, are not what they were."""
    row = damaged_in_a_row(choice)
    if len(row) < SUSPECT_AFTER:
        return None
    names = ", ".join(step.path.name for step, _ in row[:3])
    return (
        f"{len(row)} committed step directories in a row are damaged ({names}): the storage is suspect; "
        "test it with `stepkeeper checkpoints test-storage`, and look at the logs of its servers"
    )


class _NoAnswerError(Exception):
    pass


def _within(ask: Callable[[], T], limit_s: float) -> T:
    """Ask on a thread.

    Raises:
        _NoAnswerError: no answer by then; the thread is left behind.
    """
    answer: list[T] = []
    errors: list[Exception] = []

    def work() -> None:
        try:
            answer.append(ask())
        except Exception as error:  # noqa: BLE001  # raised by the asking thread
            errors.append(error)

    thread = threading.Thread(target=work, name="ask-storage", daemon=True)
    thread.start()
    thread.join(limit_s)
    if errors:
        raise errors[0]
    if not answer:
        raise _NoAnswerError
    return answer[0]
