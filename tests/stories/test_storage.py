"""Storage that is full while training goes on: nothing that was saved is lost, and nothing that was trained either."""

from __future__ import annotations

import os
import pwd
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from stepkeeper.core import events as on
from tests.lab import Lab
from tests.training import Training, assert_complete

pytestmark = [pytest.mark.slurm, pytest.mark.campaign]
SIZE = "size=4g"  # at most: saves want some room beside what they write
WITHIN_S = 90.0


@pytest.fixture
def small_disk(lab: Lab) -> Iterator[Path]:
    """A file system of the run's own."""
    at = lab.workdir("games") / "small"
    at.mkdir()
    user = pwd.getpwnam("games")
    done = mount(at, f"{SIZE},mode=0700,uid={user.pw_uid},gid={user.pw_gid}", "-t", "tmpfs", "tmpfs")
    if done.returncode != 0:
        at.rmdir()
        pytest.skip(f"no file system can be mounted here: {done.stderr.strip()}")
    yield at
    subprocess.run(["umount", "--lazy", at], check=True, timeout=120)


def mount(at: Path, options: str, *how: str) -> subprocess.CompletedProcess[str]:
    argv = ["mount", "-o", options, *how, str(at)]
    return subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False)


def fill(at: Path) -> None:
    """Leave no byte: it is made as small as what is on it, which may grow meanwhile."""
    limit = time.monotonic() + WITHIN_S
    while True:
        found = os.statvfs(at)
        used = (found.f_blocks - found.f_bfree) * found.f_frsize
        if mount(at, f"remount,size={used}").returncode == 0 and os.statvfs(at).f_bavail == 0:
            return
        assert time.monotonic() < limit, "it does not become full"


def test_a_disk_that_is_full_for_a_while_costs_saves_and_no_step(
    lab: Lab, reference: Training, small_disk: Path
) -> None:
    """What is said meanwhile waits, and is there in the end: losses, journal."""
    log = lab.workdir("games") / "full-disk.log"
    names = ("--job-name=full-disk", f"--output={log}")
    training = Training(lab, name="small/run", steps=40, every=5, step_seconds=0.4, sbatch_args=names).submit()
    training.wait_event(on.CheckpointCommitted)
    fill(small_disk)
    training.until(lambda: "older steps are untouched" in log.read_text(errors="replace"), "a save that fails")
    whole = training.committed()
    assert mount(small_disk, f"remount,{SIZE}").returncode == 0
    training.wait_end()

    assert_complete(training, reference)
    assert training.events(on.SaveFailed), training.story()
    assert len(training.launches()) == 1, training.story()
    assert whole
    assert set(whole) <= set(training.committed())
    assert 40 in training.committed()
