"""A process that is killed at any system call that changes the checkpoints leaves nothing wrong behind.

After each kill `latest` names a step whose every byte is right, and is at least the newest that was reported as
committed and not deleted on purpose; the next process loads what was saved then, saves, prunes, and clears up.
Kills cannot see a missing fsync: `test_durability` reads the order of the calls.
"""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from stepkeeper_trainer.formats.durable import STALE_S, clear_temporaries
from tests.trainer.crash import command
from tests.trainer.test_staging import has_direct

pytestmark = pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace")

LIMIT_S = 1500.0  # of a scene: generous, as other tests run beside it
# `make campaign-crash` plays every point, `make campaign` one of three
STRIDE = int(os.environ.get("STEPKEEPER_CRASH_STRIDE", "3"))
# how many points there are at least: what is not found is not killed
SCENES = {
    "save": 150,
    "save of two ranks": 70,
    "save of two ranks, one late": 70,
    "save past the page cache": 40,
    "save by way of a node's disk": 150,
    "save after a rollback": 90,
    "retention": 30,
    "tier copy": 60,
    "bring home": 25,
    "bring home from an object store": 25,
    "export": 20,
}
QUICK = ("save", "save of two ranks", "save past the page cache", "save by way of a node's disk", "export")
NEWER = "a newer attempt"  # the older one is stopped at each call, and goes on when the newer one has saved
REQUESTS = "copy to an object store"  # killed at the requests that change it, before and while and after they arrive
SCENES_AND_REQUESTS = {REQUESTS: 40, NEWER: 60} | SCENES  # the longest first


def play(tmp_path: Path, stride: int, *scenes: str) -> list[dict[str, Any]]:
    """Return the reports of `tests.trainer.crash.campaign`, or of that of requests."""
    module = {(REQUESTS,): "store", (NEWER,): "attempts"}.get(scenes, "campaign")
    words = scenes if module == "campaign" else ()
    reports = command.play(f"tests.trainer.crash.{module}", tmp_path, stride, *words, limit_s=LIMIT_S)
    for report in reports:
        counts = f"{len(report['points'])} points, {report['played']} played, {report['torn']} torn writes"
        print(f"{report['scene']}: {counts}, {report['seconds']} s")
    return reports


@pytest.mark.campaign
@pytest.mark.timeout(LIMIT_S + 20)
@pytest.mark.parametrize("scene", SCENES_AND_REQUESTS)
def test_killed_at_every_call_that_changes_the_directory(tmp_path: Path, scene: str) -> None:
    [report] = play(tmp_path, STRIDE, scene)

    assert report["problems"] == []
    assert len(report["points"]) >= SCENES_AND_REQUESTS[scene]
    assert report["played"] + report["elsewhere"] >= len(report["points"]) / STRIDE
    assert report["elsewhere"] <= 4


@pytest.mark.timeout(LIMIT_S + 20)
def test_killed_at_some_of_these_calls(tmp_path: Path) -> None:
    """One of many, of some scenes; the campaign has them all."""
    reports = play(tmp_path, 193, *QUICK)
    large = next(report["points"] for report in reports if report["scene"] == "save past the page cache")

    if has_direct(tmp_path):
        assert any(": ftruncate " in point for point in large), "files are written in whole pages, and cut"
    assert sum(": write " in point and point.split(" (")[0].endswith("__0_0.distcp") for point in large) >= 2 * 3
    assert [problem for report in reports for problem in report["problems"]] == []
    assert {report["scene"]: len(report["points"]) >= SCENES[report["scene"]] for report in reports} == dict.fromkeys(
        QUICK, True
    )


def test_what_killed_writers_of_small_files_leave_is_cleared_when_it_is_old(tmp_path: Path) -> None:
    old = time.time() - STALE_S - 60
    for name in (".outcome.json.abcd_123", ".lease.json.0a1b2c3d", ".keep", "outcome.json", ".x.json.toolongname"):
        (tmp_path / name).write_text("{")
        os.utime(tmp_path / name, (old, old))
    (tmp_path / ".outcome.json.written0").write_text("{")

    clear_temporaries(tmp_path)
    clear_temporaries(tmp_path / "missing")

    assert sorted(os.listdir(tmp_path)) == [".keep", ".outcome.json.written0", ".x.json.toolongname", "outcome.json"]
