"""What the supervisor does about warm standbys: when they are started, for whom, and when they leave."""

from __future__ import annotations

import contextlib
import os
import secrets
import sys
import time
from pathlib import Path

import pytest

from stepkeeper.core import events as on
from stepkeeper.core.state import Launch, Leaving, Next, Phase, Plan, Ranks, State
from stepkeeper.loop_tools import Clock
from stepkeeper.slurm.launch import Geometry
from stepkeeper.supervisor.actions import standbys
from stepkeeper.supervisor.actions.launch import Job
from stepkeeper.supervisor.sources.process import Inbox

WITHIN_S = 60.0
NODES = ("n1",)
# runs its program once, here, as srun would on a node
SRUN = """#!/bin/sh
while [ "${1#--}" != "$1" ]; do shift; done
SLURMD_NODENAME=n1 SLURM_LOCALID=0 exec "$@"
"""
TORCH = "class cuda:\n    is_initialized = staticmethod(lambda: False)\n"


class Told:
    """A logger that remembers."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, dict[str, object]]] = []

    def info(self, event: str, **keys: object) -> None:
        self.lines.append((event, keys))

    warning = info

    def wait(self, event: str) -> dict[str, object]:
        limit = time.monotonic() + WITHIN_S
        while not any(name == event for name, _ in self.lines):
            assert time.monotonic() < limit, f"waited for {event}: {self.lines}"
            time.sleep(0.02)
        return next(keys for name, keys in reversed(self.lines) if name == event)


@pytest.fixture
def told() -> Told:
    return Told()


def job(tmp_path: Path, *command: str) -> Job:
    return Job(
        command=command or (sys.executable, "train.py"),
        torchrun=False,
        geometry=Geometry(tasks_per_node=1),
        run_directory=tmp_path,
        run_id="r",
        attempt=0,
        socket=f"@stepkeeper-test-{secrets.token_hex(6)}/%N",
    )


@pytest.fixture
def made(tmp_path, told, monkeypatch):
    srun = tmp_path / "bin" / "srun"
    srun.parent.mkdir()
    srun.write_text(SRUN)
    srun.chmod(0o755)
    (tmp_path / "torch.py").write_text(TORCH)
    monkeypatch.setenv("PATH", f"{srun.parent}:{os.environ['PATH']}")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    inbox = Inbox(Clock())
    wanted = job(tmp_path)
    standing = standbys.Standbys(wanted, environment, inbox=inbox, log=told)  # type: ignore[arg-type]
    yield standing
    standing.close()
    limit = time.monotonic() + WITHIN_S
    while alive(wanted.socket):
        assert time.monotonic() < limit, "standbys are left behind"
        time.sleep(0.02)
    assert inbox.get(0.0) is None, "a thread failed"


def alive(socket: str) -> list[str]:
    """Return the processes that were told of this address."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # ended meanwhile, or not ours
            if f"STEPKEEPER_SOCKET={socket}".encode() in path.read_bytes():
                found.append(path.parent.name)
    return found


def training(launch: int = 0, nodes: tuple[str, ...] = NODES, plan: Plan | None = None) -> State:
    running = Launch(ranks=Ranks.RUNNING, number=launch, nodes=nodes)
    return State(phase=Phase.TRAINING, launch=running, leaving=Leaving(plan=plan))


def step(number: int, launch: int = 0) -> on.Progressed:
    return on.Progressed(at=1.0, launch=launch, step=number, loss=1.0, tokens=1)


def test_they_start_with_the_first_new_step_and_serve_the_next_launch(made, told):
    assert made.variables(0, NODES) == {}
    made.look(step(1), training())
    assert told.wait("standby_ready")["ranks"] == 1
    assert made.variables(1, NODES)[standbys.WORDS] == "1"

    made.look(step(1, 1), training(1))  # done before: nothing is imported beside a training that only catches up
    assert len(told.lines) == 1
    made.renew()
    made.look(step(2, 1), training(1))
    told.lines.clear()
    assert made.variables(2, NODES)


def test_a_launch_on_other_nodes_has_none(made, told):
    made.look(step(1), training())
    told.wait("standby_ready")

    assert made.variables(1, ("n1", "n2")) == {}
    assert made.variables(2, NODES) == {}


@pytest.mark.parametrize(
    "state",
    [State(phase=Phase.CLOSING), training(plan=Plan(next=Next.REQUEUE, why="a notice")), State(phase=Phase.DONE)],
    ids=["closing", "before a requeue", "done"],
)
def test_they_leave_before_the_job_does(made, told, state):
    made.look(step(1), training())
    told.wait("standby_ready")

    made.look(on.Tick(at=2.0), state)

    limit = time.monotonic() + WITHIN_S
    while made.variables(1, NODES):
        assert time.monotonic() < limit, "they are still there"
        time.sleep(0.02)
    assert "standby_ended" not in [name for name, _ in told.lines]


def test_one_that_cannot_import_torch_is_told_and_training_goes_on(made, told, tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('no torch here')")

    made.look(step(1), training())

    assert told.wait("standby_gone")["why"] == "ImportError: no torch here"


@pytest.mark.parametrize(
    ("command", "why"),
    [
        (("torchrun", "train.py"), "CMD starts ranks itself"),
        (("srun", "-n2", "python", "train.py"), "CMD is an own srun line"),
        (("bash", "-c", "python train.py"), "CMD is not `python script.py` or `python -m module`"),
    ],
)
def test_a_command_that_nothing_can_stand_in_for_is_told_once(tmp_path, told, command, why):
    made = standbys.Standbys(job(tmp_path, *command), {}, inbox=Inbox(Clock()), log=told)

    made.look(step(1), training())

    assert told.lines == [("standby_impossible", {"why": why})]
    assert made.variables(1, NODES) == {}
