"""Quotas: of the user, of the group that files get, and of the directory's project."""

from __future__ import annotations

import ctypes
import os
import shutil
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from stepkeeper_trainer.store import space
from stepkeeper_trainer.store.space import Account, Needs, Room, lacking, room
from tests.trainer.crash.disks import unmount

MIB = 1024 * 1024
PROJECT = 7
QUOTACTL_FD, SET_QUOTA = 443, 0x800008


def answer(hard: int, soft: int, used: int, files_hard: int, files: int, *, valid: int = 0x3F) -> bytes:
    """Return what the kernel says; limits are in KiB."""
    return struct.pack("=8QI4x", hard, soft, used, files_hard, 0, files, 0, 0, valid)


def test_quotas_of_the_kernel_are_read() -> None:
    assert space.decode_quota(answer(1000, 500, 24 * 1024, 10, 4), "me") == Room("me", 976 * 1024, 6)
    assert space.decode_quota(answer(0, 500, 600 * 1024, 0, 4), "me") == Room("me", 0, None)
    assert space.decode_quota(answer(0, 0, 5, 0, 4), "me") is None
    assert space.decode_quota(answer(1000, 0, 5, 10, 4, valid=0), "me") is None


def test_quotas_of_lustre_are_read() -> None:
    assert space.parse_lfs_quota("", "me") is None
    assert space.parse_lfs_quota("Permission denied.", "me") is None
    assert space.parse_lfs_quota("/lustre 0 0 0 - 0 0 0 -", "me") == Room("me", None, None)
    assert space.parse_lfs_quota("  /lustre/a\n  1200* 1000 1100 6d23h 7 0 10 -", "me") == Room("me", 0, 3)


def test_a_directory_on_a_file_system_without_projects_has_none(tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()

    assert {one.account for one in room(tmp_path / "own")} >= {"the file system"}
    assert not any("project" in one.account for one in room(tmp_path / "own"))


def test_files_of_a_directory_that_hands_its_group_on_count_by_that_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Account] = []
    monkeypatch.setattr(space, "_ask_kernel", lambda _, account: asked.append(account))
    monkeypatch.setattr(os, "getegid", lambda: 12345)
    own = tmp_path.stat().st_gid

    space.ask(tmp_path)
    tmp_path.chmod(0o2755)
    space.ask(tmp_path)

    assert [each.number for each in asked if each.kind == 1] == [12345, own]


def test_the_quota_of_the_directorys_project_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(space, "_project", lambda _: PROJECT)
    full = {Account(2, PROJECT): answer(1000, 0, 999 * 1024, 10, 4)}
    monkeypatch.setattr(space, "_ask_kernel", lambda _, account: full.get(account))

    assert f"the quota of project {PROJECT}: 1024 bytes left" in str(lacking(tmp_path, Needs(2000, 1)))


def test_lustre_is_asked_for_the_quota_of_the_project_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lfs = tmp_path / "lfs"
    lfs.write_text(
        '#!/bin/sh\n[ "$1 $2 $3 $4" = "quota -q -p 7" ] && echo "  $5  900  0  1000  -  7  5  10  -"\nexit 0\n'
    )
    lfs.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(space, "_kind_of", lambda _: "lustre")
    monkeypatch.setattr(space, "_project", lambda _: PROJECT)
    monkeypatch.setattr(space, "LUSTRE_WITHIN_S", 30.0)

    assert f"the quota of project {PROJECT}: 102400 bytes left" in str(lacking(tmp_path, Needs(200_000, 1)))


@pytest.fixture
def ext4(tmp_path: Path) -> Iterator[Path]:
    """An ext4 with quotas of users and projects: most kernels have them, and some have not."""
    if os.geteuid() != 0 or shutil.which("mkfs.ext4") is None:
        pytest.skip("quotas need root, and mkfs.ext4")
    image, at = tmp_path / "image", tmp_path / "mounted"
    at.mkdir()
    with image.open("wb") as file:
        file.truncate(64 * MIB)
    subprocess.run(
        ["mkfs.ext4", "-q", "-F", "-O", "quota,project", "-E", "quotatype=usrquota:grpquota:prjquota", str(image)],
        check=True, timeout=60, capture_output=True,
    )  # fmt: skip
    done = subprocess.run(
        ["mount", "-o", "loop,usrquota,prjquota", str(image), str(at)],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    if done.returncode:
        pytest.skip(f"no ext4 with quotas can be mounted here: {done.stderr.strip()}")
    yield at
    unmount(at)


def limit(directory: Path, account: Account, *, mib: int) -> None:
    """Limit an account's bytes."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    wanted = ctypes.create_string_buffer(answer(mib * 1024, 0, 0, 0, 0, valid=1))
    libc = ctypes.CDLL(None, use_errno=True)
    failed = libc.syscall(QUOTACTL_FD, descriptor, (SET_QUOTA << 8) | account.kind, account.number, wanted)
    os.close(descriptor)
    assert not failed, os.strerror(ctypes.get_errno())


def test_a_real_quota_of_a_user_is_seen(ext4: Path) -> None:
    limit(ext4, Account(0, os.geteuid()), mib=8)

    [found] = space.ask(ext4)

    assert found.account == f"the quota of user {os.geteuid()}"
    assert found.bytes_left is not None
    assert 0 < found.bytes_left <= 8 * MIB


def test_a_real_quota_of_a_project_is_seen(ext4: Path) -> None:
    own = ext4 / "checkpoints"
    own.mkdir()
    subprocess.run(["chattr", "-p", str(PROJECT), "+P", str(own)], check=True, timeout=60)
    limit(ext4, Account(2, PROJECT), mib=8)
    (own / "step").write_bytes(bytes(4 * MIB))
    os.sync()

    [found] = space.ask(own)

    assert found.account == f"the quota of project {PROJECT}"
    assert found.bytes_left is not None
    assert 3 * MIB < found.bytes_left <= 4 * MIB
    assert space.ask(ext4) == [], "the directory above is of no project"
    [disk] = [one for one in room(own) if one.account == "the file system"]
    assert disk.bytes_left is not None
    assert disk.bytes_left <= 4 * MIB, "which those are told who may not ask for the quota"
