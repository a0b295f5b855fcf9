"""A node that is really slow: a process of it gets a share of a processor, by the kernel's own scheduler."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path("/sys/fs/cgroup")
PERIOD_US = 100_000
LEFT_WITHIN_S = 30.0


def _hierarchy() -> tuple[Path, bool] | None:
    """Return where groups are made, and whether by version 2; None where root may not."""
    if (ROOT / "cgroup.controllers").exists():
        ours = "cpu" in (ROOT / "cgroup.subtree_control").read_text().split()
        return (ROOT, True) if ours and os.access(ROOT, os.W_OK) else None
    for name in ("cpu", "cpu,cpuacct"):
        if (ROOT / name / "cgroup.procs").exists() and os.access(ROOT / name, os.W_OK):
            return ROOT / name, False
    return None


def require() -> None:
    """Skip the test where the kernel slows nothing down for us."""
    if _hierarchy() is None:
        pytest.skip(f"no cgroup below {ROOT} in which the cpu controller may be used")


@contextlib.contextmanager
def throttled(pid: int, share: float) -> Iterator[None]:
    """Have a process run for at most `share` of one processor's time."""
    found = _hierarchy()
    assert found is not None, "call `require` first"
    base, second = found
    group = base / f"stepkeeper-test-{pid}"
    group.mkdir()
    try:
        quota_us = int(share * PERIOD_US)
        if second:
            (group / "cpu.max").write_text(f"{quota_us} {PERIOD_US}")
        else:
            (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
            (group / "cpu.cfs_quota_us").write_text(str(quota_us))
        (group / "cgroup.procs").write_text(str(pid))
        yield
    finally:
        _remove(group, base)


def _remove(group: Path, base: Path) -> None:
    limit = time.monotonic() + LEFT_WITHIN_S
    while True:
        for pid in (group / "cgroup.procs").read_text().split():
            with contextlib.suppress(ProcessLookupError):  # it ends just now
                (base / "cgroup.procs").write_text(pid)
        try:
            group.rmdir()
        except OSError:  # one that ends is in it still
            if time.monotonic() > limit:
                raise
            time.sleep(0.1)
        else:
            return
