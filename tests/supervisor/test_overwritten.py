"""Ranks that overwrite the memory of their environment, as `setproctitle` does, are found like any others."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from stepkeeper.watcher.processes import RankSteps, kill_ranks, rank_processes

NODE = "n1"
WITHIN_S = 60.0
# as a slurmstepd: a session of its own, and below it a wrapper, ranks, and one that left the session
STEPD = """\
import ctypes, os, subprocess, sys
ctypes.CDLL(None).prctl(15, b"slurmstepd", 0, 0, 0)
sys.executable = os.readlink("/proc/self/exe")
place, overwriting, ranks = sys.argv[1], sys.argv[2], {**os.environ, **eval(sys.argv[3])}
def start(name, *options, env=ranks, **more):
    process = subprocess.Popen([sys.executable, "-c", overwriting, f"{place}/{name}", *options], env=env, **more)
    open(f"{place}/{name}.pid.new", "w").write(str(process.pid))
    os.rename(f"{place}/{name}.pid.new", f"{place}/{name}.pid")
    return process
all = [start("wrapper"), start("rank", "overwrites"), start("left", "overwrites", start_new_session=True)]
all.append(start("without", env=dict(os.environ)))
for each in all:
    each.wait()
"""
OVERWRITING = """\
import ctypes, os, sys, time
if os.path.basename(sys.argv[1]) == "without":
    ctypes.CDLL(None).prctl(15, b"srun", 0, 0, 0)
if "overwrites" in sys.argv:
    fields = open("/proc/self/stat").read().rpartition(")")[2].split()
    start, end = int(fields[47]), int(fields[48])
    ctypes.memset(start, 0, end - start)
open(sys.argv[1], "w").close()
time.sleep(600)
"""


class Step:
    """One Slurm step on this node: pids by name."""

    def __init__(self, place: Path, run_id: str | None, title: str = "slurmstepd: [7.1]") -> None:
        place.mkdir()
        variables = {"STEPKEEPER_RUN_ID": run_id, "SLURMD_NODENAME": NODE} if run_id else {"SLURMD_NODENAME": NODE}
        words = [title, "-c", STEPD, str(place), OVERWRITING, repr(variables)]
        self.stepd = subprocess.Popen(words, executable=sys.executable, start_new_session=True)
        names = ("wrapper", "rank", "left", "without")
        limit = time.monotonic() + WITHIN_S
        while not all((place / name).exists() for name in names):
            assert time.monotonic() < limit, list(place.iterdir())
            assert self.stepd.poll() is None
            time.sleep(0.02)
        self.pids = {name: int((place / f"{name}.pid").read_text()) for name in names}

    def close(self) -> None:
        for pid in self.pids.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.stepd.wait(WITHIN_S)


@pytest.fixture
def run_id() -> str:
    return secrets.token_hex(8)


@pytest.fixture
def step(tmp_path: Path, run_id: str) -> Iterator[Step]:
    made = Step(tmp_path / "ours", run_id)
    yield made
    made.close()


@pytest.fixture
def another(tmp_path: Path) -> Iterator[Step]:
    """Another Slurm step of the same user on the same node, such as `srun ray start --block`."""
    made = Step(tmp_path / "another", None)
    yield made
    made.close()


def test_a_rank_without_an_environment_is_found_by_its_slurm_step(step: Step, another: Step, run_id: str) -> None:
    """Those of another Slurm step are nobody's ranks, though their environment tells as little."""
    assert set(rank_processes(run_id, NODE, attempt_max=0)) == {step.pids["wrapper"]}
    steps = RankSteps()
    steps.learn(step.pids["wrapper"])

    found = set(rank_processes(run_id, NODE, attempt_max=0, steps=steps))

    assert found == set(step.pids.values())
    assert not found & set(another.pids.values())


def test_it_is_ended_and_then_nothing_is_left(step: Step, run_id: str) -> None:
    """Also after its wrapper, which alone could tell whose it is, has ended."""
    steps = RankSteps()
    steps.learn(step.pids["wrapper"])
    os.kill(step.pids["wrapper"], signal.SIGKILL)

    assert kill_ranks(run_id, NODE, attempt_max=0, steps=steps) >= 3
    limit = time.monotonic() + WITHIN_S
    while list(rank_processes(run_id, NODE, attempt_max=0, steps=steps)):
        assert time.monotonic() < limit
        time.sleep(0.02)
    assert step.stepd.wait(WITHIN_S) == 0


def test_nothing_is_learned_outside_of_slurm_or_of_our_own_step() -> None:
    steps = RankSteps()
    steps.learn(os.getpid())

    assert not steps
    assert not steps.has(os.getpid())


def test_nothing_is_learned_of_the_batch_step(tmp_path: Path, run_id: str) -> None:
    """The srun of a launch has the environment of its ranks: what is beside it is the supervisor."""
    batch = Step(tmp_path / "batch", run_id, "slurmstepd: [7.batch]")
    steps = RankSteps()
    try:
        steps.learn(batch.pids["wrapper"])
        assert not steps
        assert set(rank_processes(run_id, NODE, attempt_max=0, steps=steps)) == {batch.pids["wrapper"]}
    finally:
        batch.close()


def test_nothing_is_learned_from_an_srun(step: Step) -> None:
    """Also where the title of its slurmstepd does not tell."""
    steps = RankSteps()
    steps.learn(step.pids["without"])

    assert not steps


def test_what_was_learned_is_forgotten_with_its_launch(step: Step, run_id: str) -> None:
    steps = RankSteps()
    steps.learn(step.pids["wrapper"])
    steps.forget()

    assert set(rank_processes(run_id, NODE, attempt_max=0, steps=steps)) == {step.pids["wrapper"]}


def test_a_watchers_own_ancestors_are_no_ranks(run_id: str) -> None:
    """A shell with a rank's environment starts what looks for ranks: it does not find, and so not end, that shell."""
    look = (
        f"from stepkeeper.watcher.processes import kill_ranks; print(kill_ranks({run_id!r}, {NODE!r}, attempt_max=0))"
    )
    environment = {**os.environ, "STEPKEEPER_RUN_ID": run_id, "SLURMD_NODENAME": NODE}
    words = ["sh", "-c", '"$0" -c "$1"; echo "ended with $?"', sys.executable, look]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=WITHIN_S, check=True)

    assert done.stdout.split("\n")[:2] == ["0", "ended with 0"]
