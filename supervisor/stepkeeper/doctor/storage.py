"""Whether a file system does what checkpoints and the lease stand on.  It writes a little, and cleans up."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from stepkeeper.doctor.finding import Finding, Level
from stepkeeper.doctor.site import file_system
from stepkeeper.printing import size
from stepkeeper_trainer.store import space

LOCAL = ("tmpfs", "overlay", "ramfs")
TEST_BYTES = 16 * 2**20


def examine(directory: Path) -> Iterator[Finding]:
    """Try on a directory what a save does, and what the lease does."""
    kind = file_system(directory) or "unknown"
    subject = f"storage {directory}"
    if kind in LOCAL:
        yield Finding(
            level=Level.WARNING,
            subject=subject,
            found=kind,
            means="a file system of this node alone, or of its memory: other nodes do not see it, or it is gone with "
            "the node",
            remedy="set --run-dir (or STEPKEEPER_RUN_DIR) to shared storage",
        )
    test = space.storage_test(directory, size=TEST_BYTES)
    if test.problem is not None:
        yield Finding(
            level=Level.PROBLEM,
            subject=subject,
            found=test.problem,
            means="what a save needs does not work here: write, fsync, rename, read back",
            remedy="choose another --run-dir, or show the admin this line",
        )
        return
    speed = f"{size(int(test.bytes / test.write_s))}/s" if test.write_s else "not measured"
    yield Finding(
        level=Level.OK,
        subject=subject,
        found=f"{kind}, {speed} for {size(test.bytes)}",
        means="write, fsync, rename and read back work",
    )
    yield from _links(directory, subject)


def _links(directory: Path, subject: str) -> Iterator[Finding]:
    """Hard links are what unchanged files of a save cost nothing with, and what locks the run directory."""
    with tempfile.TemporaryDirectory(prefix=".stepkeeper-doctor-", dir=directory) as place:
        one, other = Path(place, "one"), Path(place, "other")
        one.write_bytes(b"1")
        try:
            os.link(one, other)
        except OSError as error:
            yield Finding(
                level=Level.NOTE,
                subject=subject,
                found=f"no hard links ({error.strerror})",
                means="files that did not change since the last save are written again",
            )
            return
        with contextlib.suppress(FileNotFoundError):  # some file systems remove both names
            other.unlink()
