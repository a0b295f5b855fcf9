"""Room for the next save, and storage that does not give back what it was given."""

from __future__ import annotations

import errno
import os
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from stepkeeper_trainer.formats.manifest import read_manifest
from stepkeeper_trainer.formats.steps import newest_verified
from stepkeeper_trainer.store import space
from stepkeeper_trainer.store.space import MARGIN_BYTES, Needs, estimate, lacking, storage_test
from tests.trainer.test_formats import make_step

MIB = 1024 * 1024


def test_the_next_save_is_estimated_from_the_last(tmp_path: Path) -> None:
    last = read_manifest(make_step(tmp_path, 1))
    size = sum(entry.bytes for entry in last.files.values())

    assert estimate(last) == Needs(int(size * 1.1) + MARGIN_BYTES, 12)
    assert estimate(last, state_bytes=10**9).bytes == int(1.1e9) + MARGIN_BYTES, "the state has grown"
    assert estimate(None, state_bytes=1000, world_size=64) == Needs(1100 + MARGIN_BYTES, 136)


def test_too_few_bytes_are_said(tmp_path: Path, mounted: Callable[..., Path]) -> None:
    disk = mounted(tmp_path / "mounted", "size=8m")

    assert lacking(disk, Needs(4 * MIB, 10)) is None
    (disk / "other").write_bytes(bytes(6 * MIB))
    said = lacking(disk, Needs(4 * MIB, 10))
    assert said is not None
    assert said.startswith(f"{disk}: the file system: 2097152 bytes left")


def test_too_few_inodes_are_said(tmp_path: Path, mounted: Callable[..., Path]) -> None:
    disk = mounted(tmp_path / "mounted", "size=8m,nr_inodes=20")

    assert lacking(disk, Needs(1, 10)) is None
    assert "room for 19 more files" in str(lacking(disk, Needs(1, 30)))


def test_a_directory_that_is_not_there_is_said(tmp_path: Path) -> None:
    assert "No such file" in str(lacking(tmp_path / "nowhere", Needs(1, 1)))


def test_a_file_system_that_does_not_answer_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    statvfs = os.statvfs

    def slow(path: object) -> os.statvfs_result:
        time.sleep(3)
        return statvfs(path)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "statvfs", slow)

    assert "has not answered for 0.1 s" in str(lacking(tmp_path, Needs(1, 1), within_s=0.1))


def test_a_quota_counts_as_the_disk_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(space, "ask", lambda _: [space.Room("the quota of user 7", 1000, 5)])

    assert "the quota of user 7: 1000 bytes left" in str(lacking(tmp_path, Needs(2000, 1)))
    assert "room for 5 more files" in str(lacking(tmp_path, Needs(10, 6)))


# A dummy save -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 4096, 5 * MIB + 3])
def test_good_storage_gives_back_what_it_was_given(tmp_path: Path, size: int) -> None:
    found = storage_test(tmp_path, size=size)

    assert found.problem is None
    assert found.write_s is not None
    assert found.read_s is not None
    assert os.listdir(tmp_path) == []


def test_a_full_disk_is_found_and_left_as_it_was(tmp_path: Path, mounted: Callable[..., Path]) -> None:
    disk = mounted(tmp_path / "mounted", "size=2m")

    found = storage_test(disk, size=4 * MIB)

    assert found.problem == f"{disk}: cannot write: No space left on device"
    assert os.listdir(disk) == []


def test_a_disk_without_inodes_is_found(tmp_path: Path, mounted: Callable[..., Path]) -> None:
    disk = mounted(tmp_path / "mounted", "size=2m,nr_inodes=2")

    assert storage_test(disk, size=10).problem == f"{disk}: cannot create a file: No space left on device"


def test_a_read_only_disk_is_found(tmp_path: Path, mounted: Callable[..., Path]) -> None:
    disk = mounted(tmp_path / "mounted", "size=2m")
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True, timeout=90)

    assert storage_test(disk, size=10).problem == f"{disk}: cannot make a directory: Read-only file system"


def test_an_error_at_the_sync_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", broken)

    assert storage_test(tmp_path, size=10).problem == f"{tmp_path}: cannot sync a file: Input/output error"


@pytest.mark.parametrize("lie", ["another byte", "fewer bytes"])
def test_storage_that_lies_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lie: str) -> None:
    real = space.write_all

    def lying(descriptor: int, data: bytes) -> None:
        real(descriptor, data[:-1] + (b"" if lie == "fewer bytes" else bytes([data[-1] ^ 1])))

    monkeypatch.setattr(space, "write_all", lying)

    problem = storage_test(tmp_path, size=MIB).problem

    assert problem is not None
    assert "gives back" in problem
    assert os.listdir(tmp_path) == []


def test_storage_that_hangs_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.fsync
    answers = threading.Event()

    def slow(descriptor: int) -> None:
        answers.wait(100)
        real(descriptor)

    monkeypatch.setattr(os, "fsync", slow)

    found = storage_test(tmp_path, size=10, limit_s=2)

    assert found.problem == f"{tmp_path}: hangs: to sync a file takes longer than 2 s for the whole test"
    answers.set()
    limit_at = time.monotonic() + 60
    while os.listdir(tmp_path):
        assert time.monotonic() < limit_at, "what it lets us remove afterwards is removed"
        time.sleep(0.05)


def test_what_a_killed_test_has_left_is_removed_by_a_later_one(tmp_path: Path) -> None:
    for name, age_s in (("old", 7200), ("new", 10)):
        (tmp_path / f"{space.TEST_PREFIX}{name}").mkdir()
        os.utime(tmp_path / f"{space.TEST_PREFIX}{name}", (time.time() - age_s,) * 2)

    storage_test(tmp_path, size=10)

    assert os.listdir(tmp_path) == [f"{space.TEST_PREFIX}new"]


def test_several_damaged_steps_in_a_row_make_the_storage_suspect(tmp_path: Path) -> None:
    for step in range(1, 5):
        make_step(tmp_path, step)
    assert space.suspicion(newest_verified(tmp_path)) is None
    for step in (4, 3):
        os.truncate(tmp_path / f"step_0000000{step}/__0_0.distcp", 5)
        said = space.suspicion(newest_verified(tmp_path))
        assert (said is None) == (step == 4), "one is bad luck"
    assert "2 committed step directories in a row are damaged (step_00000004, step_00000003)" in str(said)

    (tmp_path / "step_00000004/MANIFEST.json").unlink()
    assert space.suspicion(newest_verified(tmp_path)) is None, "a save that never ended says nothing of the storage"
