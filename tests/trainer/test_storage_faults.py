"""Storage that fails in the middle of a save costs that save and nothing else.

Real faults of real file systems, begun at a system call of a save: the disk is full, out of inodes, over its quota,
mounted again for reading only, loses what was written, or is gone; then single calls that fail.  Each time training
goes on, every committed step is whole, the event names the error and the file, and the next save is made when the
fault is over.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.crash import command
from tests.trainer.crash.disks import DISKS, Gone, NotHereError

pytestmark = pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace")

LIMIT_S = 580.0
INJECTED = ("EIO", "ESTALE", "EDQUOT", "ENOSPC", "EROFS")
OF_TWO = "injected EIO of two ranks"  # a report of rank 1 whose directory is not durable, for one
FAULTS = [*(disk.name for disk in DISKS), *(f"injected {name}" for name in INJECTED), OF_TWO]
# with STEPKEEPER_CRASH_STRIDE=1 each call fails once, else one of three
EIO_STRIDE = int(os.environ.get("STEPKEEPER_CRASH_STRIDE", "3"))
POINTS_MIN = 60  # system calls of the saves that are struck


def play(tmp_path: Path, stride: int, *faults: str) -> list[dict[str, Any]]:
    """Return the reports of `tests.trainer.crash.storage`; skip where this machine has none of these faults."""
    reports = command.play("tests.trainer.crash.storage", tmp_path, stride, *faults, limit_s=LIMIT_S)
    for report in reports:
        print({name: value for name, value in report.items() if name != "problems"})
    if absent := [f"{report['fault']}: {report['absent']}" for report in reports if report["absent"]]:
        assert os.environ.get("TEST_REQUIRE_SLURM") != "1" or os.getuid() != 0, absent
        if len(absent) == len(reports):
            pytest.skip("; ".join(absent))
    return [report for report in reports if not report["absent"]]


@pytest.mark.campaign
@pytest.mark.timeout(LIMIT_S + 20)
@pytest.mark.parametrize("fault", FAULTS)
def test_storage_fails_at_many_calls_of_a_save(tmp_path: Path, fault: str) -> None:
    [report] = play(tmp_path, EIO_STRIDE if fault in ("injected EIO", OF_TWO) else 5, fault)

    assert report["problems"] == []
    assert report["points"] >= POINTS_MIN
    assert report["played"] + report["busy"] >= report["points"] // 5
    assert report["failed"] > report["played"] / 2


@pytest.mark.timeout(LIMIT_S + 20)
def test_storage_fails_in_the_middle_of_a_save(tmp_path: Path) -> None:
    """Each fault at a call or two: `make campaign` plays many."""
    reports = play(tmp_path, 40, *(disk.name for disk in DISKS), "injected ESTALE")

    assert [problem for report in reports for problem in report["problems"]] == []
    assert all(report["played"] for report in reports)
    assert all(report["failed"] for report in reports)


def test_a_disk_that_was_gone_is_well_again_though_another_mount_namespace_still_has_it(tmp_path: Path) -> None:
    """Labs of other tests on the machine, for one."""
    if os.getuid() != 0:
        pytest.skip("needs root: mounts")
    try:
        disk = Gone(tmp_path / "root", tmp_path / "backing")
    except NotHereError as error:
        pytest.skip(str(error))
    file = disk.at / "file"
    file.write_text("here before")
    os.sync()
    with subprocess.Popen(["unshare", "--mount", "sleep", "600"]) as other:
        try:
            mounts, limit_at = Path(f"/proc/{other.pid}/mountinfo"), time.monotonic() + 60
            own = os.readlink("/proc/self/ns/mnt")
            while os.readlink(f"/proc/{other.pid}/ns/mnt") == own or str(disk.at) not in mounts.read_text():
                assert time.monotonic() < limit_at
                time.sleep(0.01)
            disk.strike()
            with pytest.raises(OSError, match="Input/output error"):
                file.read_text()
            disk.again()

            assert file.read_text() == "here before"
        finally:
            other.kill()
            disk.remove()
