"""A run of CI and its parts end in time, with all that they have started."""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LIMIT_S = 60.0
FOREVER = 10.0**12
# a child in its group, and a daemon that has left it and ignores what may be ignored
STARTS = """\
import os, pathlib, signal, subprocess, sys, time
child = subprocess.Popen(["sleep", "600"])
daemon = subprocess.Popen(["sh", "-c", "trap '' INT TERM; sleep 600 & echo $! >daemon; wait"], start_new_session=True)
while not pathlib.Path("daemon").exists() or not pathlib.Path("daemon").read_text().endswith("\\n"):
    time.sleep(0.01)
pathlib.Path("pids").write_text(f"{child.pid} {daemon.pid}")
if sys.argv[1] == "leave":
    os._exit(3)
try:
    time.sleep(600)
except KeyboardInterrupt:
    pathlib.Path("cleared up").touch()
    raise
"""


def play(tmp_path: Path, minutes: float, *command: str, until: float = FOREVER) -> tuple[int, str]:
    line = [sys.executable, "-m", "tests.in_time", str(until), str(minutes), "the part", *command]
    # as a shell's background command: SIGINT is ignored
    ended = subprocess.run(
        ["sh", "-c", 'trap "" INT; exec "$@"', "sh", *line], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, check=False, timeout=LIMIT_S,
    )  # fmt: skip
    return ended.returncode, ended.stderr


def running(tmp_path: Path) -> list[int]:
    pids = [*(tmp_path / "pids").read_text().split(), (tmp_path / "daemon").read_text().strip()]
    return [int(pid) for pid in pids if Path(f"/proc/{pid}").exists()]


@pytest.mark.parametrize("by", ["its own limit", "the end of the run"])
def test_a_part_that_is_late_is_named_and_ended_with_all_that_it_has_started(tmp_path: Path, by: str) -> None:
    limits = {"minutes": 0.05} if by == "its own limit" else {"minutes": 60, "until": time.time() + 3}

    code, said = play(
        tmp_path, limits["minutes"], sys.executable, "-c", STARTS, "stay", until=limits.get("until", FOREVER)
    )

    assert code == 124, said
    assert "the part RAN OUT OF TIME after 0.0 minutes" in said or "after 0.1 minutes" in said
    assert (tmp_path / "cleared up").exists()
    assert not running(tmp_path)


def test_what_a_part_leaves_behind_is_named_and_ended(tmp_path: Path) -> None:
    code, said = play(tmp_path, 1, sys.executable, "-c", STARTS, "leave")

    assert code == 3, said
    assert "the part left behind, killed now: sleep 600" in said
    assert not running(tmp_path)


def test_an_orphan_that_has_ended_is_gone_at_once(tmp_path: Path) -> None:
    looks = (
        "import pathlib, subprocess, sys, time\n"
        "shell = ['sh', '-c', 'sleep 0.3 & echo $!']\n"
        "said = subprocess.run(shell, stdout=subprocess.PIPE, timeout=60).stdout\n"
        "place = pathlib.Path('/proc', said.decode().strip())\n"
        "until = time.monotonic() + 30\n"
        "while place.exists() and time.monotonic() < until:\n"
        "    time.sleep(0.01)\n"
        "sys.exit(place.exists())\n"
    )
    code, said = play(tmp_path, 1, sys.executable, "-c", looks)

    assert code == 0, said


def test_a_part_says_how_long_it_took(tmp_path: Path) -> None:
    code, said = play(tmp_path, 1, "true")

    assert code == 0
    assert "the part took 0 s, exit code 0" in said
    assert "left behind" not in said


def test_a_run_whose_time_is_over_begins_nothing_more(tmp_path: Path) -> None:
    code, said = play(tmp_path, 1, "sleep", "600", until=1.0)

    assert code == 124
    assert "the part RAN OUT OF TIME" in said


# writes down what it was called for, and ends as the test wants
MAKE = """\
#!/bin/sh
echo "$*" >>made
echo "TOTAL 100%"
case "$*" in
"$FAILS") exit 2 ;;
"$LATE") exit 124 ;;
esac
"""
SECOND = "second-look"
PACKAGES = "test-state-packages"
OLDEST = "test-torch-oldest TORCH_OLDEST_WITHIN_S=30"


@pytest.mark.parametrize(
    ("fails", "late", "code", "made"),
    [
        ("", "", 0, ["test", "campaign-and-newest PART=3/10"]),
        ("test", "", 0, ["test", SECOND, "campaign-and-newest PART=3/10"]),
        ("campaign-and-newest PART=3/10", "", 0, ["test", "campaign-and-newest PART=3/10", SECOND]),
        (SECOND, "", 0, ["test", "campaign-and-newest PART=3/10"]),
        ("demo", "", 2, []),
        ("", "test", 124, ["test"]),
        ("coverage-core", "", 1, ["test", "campaign-and-newest PART=3/10"]),
        ("docs", "", 1, ["test", "campaign-and-newest PART=3/10"]),
        ("newest-slurm", "", 2, ["test"]),
    ],
)
def test_a_run_plays_its_parts_and_looks_twice_at_what_failed_only(
    tmp_path: Path, fails: str, late: str, code: int, made: list[str]
) -> None:
    assert run_ci(tmp_path, commits=2, fails=fails, late=late) == (code, made)


@pytest.mark.parametrize(
    ("commits", "fails", "made"),
    [
        (5, "", ["campaign-and-newest PART=6/10", OLDEST]),
        (12, "", ["campaign-and-newest PART=2/10"]),
        (21, "", ["test-frameworks", PACKAGES]),
        (21, "test-frameworks", ["test-frameworks", SECOND, PACKAGES]),
        (11, "", ["campaign-and-newest PART=1/10"]),
    ],
)
def test_runs_take_turns_with_the_campaign_and_the_frameworks(
    tmp_path: Path, commits: int, fails: str, made: list[str]
) -> None:
    assert run_ci(tmp_path, commits=commits, fails=fails) == (0, ["test", *made])


def run_ci(tmp_path: Path, *, commits: int, fails: str, late: str = "") -> tuple[int, list[str]]:
    """Play `.ci/run` with a `make` that does nothing; return its exit code and what it made in turn."""
    for name in (".ci/run", "tests/in_time.py", "tests/__init__.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / ".venv").mkdir()
    make = tmp_path / "bin/make"
    make.parent.mkdir()
    make.write_text(MAKE)
    make.chmod(0o755)
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run([*git, "init", "-q"], check=True, timeout=LIMIT_S)
    for _ in range(commits):
        subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "some"], check=True, timeout=LIMIT_S)
    path = f"{make.parent}:{Path(sys.executable).parent}:{os.environ['PATH']}"

    ended = subprocess.run(
        [str(tmp_path / ".ci/run")], env={**os.environ, "PATH": path, "FAILS": fails, "LATE": late},
        capture_output=True, text=True, check=False, timeout=2 * LIMIT_S,
    )  # fmt: skip

    played = (tmp_path / "made").read_text().splitlines()
    beside = ("setup", "newest-slurm", "demo", "coverage-core", "docs", "torch-oldest")
    return ended.returncode, [each for each in played if each not in beside]
