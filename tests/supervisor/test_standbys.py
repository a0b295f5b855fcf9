"""What the supervisor does about warm standbys: when they are started, for whom, and when they leave."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from stepkeeper import wrapper
from stepkeeper.core import events as on
from stepkeeper.core.state import Launch, Leaving, Next, Nodes, Phase, Plan, Ranks, State
from stepkeeper.loop_tools import Clock
from stepkeeper.slurm.launch import Geometry
from stepkeeper.supervisor.actions import launch, standbys
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
def fake(tmp_path, told, monkeypatch):
    """Makes the standbys of a job, whose srun runs its program here; sees to it that nothing is left of them."""
    srun = tmp_path / "bin" / "srun"
    srun.parent.mkdir()
    srun.write_text(SRUN)
    srun.chmod(0o755)
    (tmp_path / "torch.py").write_text(TORCH)
    monkeypatch.setenv("PATH", f"{srun.parent}:{os.environ['PATH']}")
    inbox = Inbox(Clock())
    standing = []

    def make(wanted: Job, environment: dict[str, str], *, always: bool = True) -> standbys.Standbys:
        made = standbys.Standbys(wanted, environment, always=always, inbox=inbox, log=told)  # type: ignore[arg-type]
        standing.append((wanted, made))
        return standing[-1][1]

    yield make
    for wanted, each in standing:
        each.close()
        limit = time.monotonic() + WITHIN_S
        while alive(wanted.socket):
            assert time.monotonic() < limit, "standbys are left behind"
            time.sleep(0.02)
    assert inbox.get(0.0) is None, "a thread failed"


@pytest.fixture
def seldom(fake, tmp_path):
    """Those of a run with the setting as it comes: only where a relaunch is likely."""
    return fake(job(tmp_path), {**os.environ, "PYTHONPATH": str(tmp_path)}, always=False)


@pytest.fixture
def made(fake, tmp_path):
    return fake(job(tmp_path), {**os.environ, "PYTHONPATH": str(tmp_path)})


def alive(socket: str) -> list[str]:
    """Return the processes that were told of this address."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # ended meanwhile, or not ours
            if f"STEPKEEPER_SOCKET={socket}".encode() in path.read_bytes():
                found.append(path.parent.name)
    return found


def training(number: int = 0, nodes: tuple[str, ...] = NODES, plan: Plan | None = None) -> State:
    running = Launch(ranks=Ranks.RUNNING, number=number, nodes=nodes, step=1)
    return State(phase=Phase.TRAINING, launch=running, leaving=Leaving(plan=plan))


def step(number: int, of: int = 0) -> on.Progressed:
    return on.Progressed(at=1.0, launch=of, step=number, loss=1.0, tokens=1)


def test_they_start_with_the_first_new_step_and_serve_the_next_launch(made, told):
    assert made.variables(0, NODES) == {}
    made.look(step(1), training())
    assert told.wait("standby_ready")["ranks"] == 1
    assert made.variables(1, NODES)[standbys.WORDS] == "1"
    assert made.variables(1, NODES) == {}, "a launch that fails early is followed by one that finds none"

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


ASLEEP = on.Suspected(at=1.0, nodes=NODES, rank=0)


def test_by_default_they_start_when_a_rank_is_suspected_and_leave_with_the_next_step(seldom, told):
    seldom.look(step(1), training())
    assert seldom.variables(1, NODES) == {}, "training works"

    seldom.look(ASLEEP, training())
    told.wait("standby_ready")
    assert seldom.variables(1, NODES)[standbys.WORDS] == "1"

    seldom.look(step(2), training())  # a false alarm, or the relaunch has come as far
    assert seldom.variables(1, NODES) == {}
    told.lines.clear()
    seldom.look(ASLEEP, training())
    assert seldom.variables(1, NODES) == {}, "a rank that sleeps again and again has torch imported once"
    seldom.look(msgspec.structs.replace(ASLEEP, at=ASLEEP.at + standbys.SUSPECTED_AGAIN_S), training())
    told.wait("standby_ready")
    assert seldom.variables(1, NODES), "the next pause may be a hang"
    seldom.look(step(3), training())
    told.lines.clear()
    seldom.look(step(4, 1), training(1))
    seldom.look(on.Suspected(at=1.0, nodes=NODES, rank=0), training(1))
    told.wait("standby_ready")
    assert seldom.variables(2, NODES)


def test_a_rank_that_runs_in_one_is_not_ended_by_a_suspicion(seldom, told, tmp_path):
    """Those of the launch before hold the ranks, and leave only with them."""
    seldom.look(ASLEEP, training())
    told.wait("standby_ready")
    place = seldom.variables(1, NODES)[standbys.VARIABLE].replace("%N", "n1")
    pid, _held = take(place, tmp_path)

    seldom.look(step(2, 1), training(1))
    seldom.look(ASLEEP, training(1))
    told.lines.clear()
    told.wait("standby_ready")

    assert seldom.variables(2, NODES)[standbys.VARIABLE].replace("%N", "n1") != place
    assert Path(f"/proc/{pid}/cmdline").read_bytes(), "the rank that sleeps may go on yet"


def test_ranks_outlive_the_standbys_of_torchrun(fake, tmp_path, told, monkeypatch):
    """The step of torchrun's standbys has ended; the next ones take the place of those whose ranks train."""
    monkeypatch.setattr(standbys, "ENDED", ((0.1, signal.SIGTERM), (0.3, signal.SIGKILL)))
    made = fake(
        job(tmp_path, sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=1", "train.py"),
        {**os.environ, "PYTHONPATH": str(tmp_path)},
    )
    made.look(step(1), training())
    told.wait("standby_ready")
    told.wait("standby_of_torchrun_ready")
    found = made.variables(1, NODES)
    pid, _held = take(found[wrapper.HOOK].replace("%N", "n1"), tmp_path, "-u")
    agents = f"{standbys.VARIABLE}={found[standbys.VARIABLE]}".encode()
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # ended meanwhile, or not ours
            if agents in path.read_bytes():
                os.kill(int(path.parent.name), signal.SIGKILL)
    told.wait("standby_ended")
    told.lines.clear()

    made.look(step(2, 1), training(1))
    told.wait("standby_ready")
    time.sleep(1.0)

    assert Path(f"/proc/{pid}/cmdline").read_bytes(), "the rank trains"


@pytest.mark.parametrize("taken", [False, True], ids=["waits", "is a rank"])
def test_a_kill_for_lack_of_memory_is_the_launchs_where_its_rank_is_killed(fake, told, tmp_path, taken):
    """Who only waits is killed first, and says nothing of the training."""
    said = "slurmstepd: error: Detected 1 oom_kill event in StepId=7.2. Some of the step tasks have been OOM Killed."
    srun = tmp_path / "bin" / "srun"
    srun.write_text(
        SRUN.replace(
            "SLURMD_NODENAME",
            f"((while [ ! -e {tmp_path}/oom ]; do sleep 0.02; done; echo '{said}' >&2) &)\nSLURMD_NODENAME",
        )
    )
    theirs = fake(job(tmp_path), {**os.environ, "PYTHONPATH": str(tmp_path)})
    theirs.look(step(1), training())
    told.wait("standby_ready")
    place = theirs.variables(1, NODES)[standbys.VARIABLE].replace("%N", "n1")
    log = tmp_path / "logs" / "attempt-000" / "launch-001" / launch.SRUN_LOG
    log.parent.mkdir(parents=True)
    if taken:
        take(place, tmp_path)
        told.wait("standby_taken")

    (tmp_path / "oom").touch()

    beside = log.parent.parent / standbys.LOG
    until(lambda: beside.exists() and said in beside.read_text())
    theirs.close()
    assert log.exists() == taken


def take(place, tmp_path, *options):
    """Have a standby become a rank that runs, and return its pid and what holds it."""
    script, up = tmp_path / "train.py", tmp_path / "up"
    script.write_text(f"import time\nopen({str(up)!r}, 'w').close()\ntime.sleep(600)\n")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "SLURMD_NODENAME": "n1", "SLURM_LOCALID": "0"}
    taken = wrapper.Standby(place, "SLURM_LOCALID", environment)
    pid = taken.take([sys.executable, *options], [str(script)], environment)
    assert pid, taken.reported
    until(up.exists)
    return pid, taken


def starting(*usable: str, wanted: int = 1) -> State:
    """A launch on n1 has ended, and these nodes are the allocation."""
    ended = Launch(number=1, nodes=NODES)
    return State(phase=Phase.STARTING, launch=ended, nodes=Nodes(usable=usable, wanted=wanted))


def test_where_a_node_is_late_they_start_on_those_that_would_take_its_place(seldom, told):
    late = on.Suspected(at=1.0, nodes=("n1",))

    seldom.look(late, training())  # ranks there may live on
    seldom.look(late, starting("n1"))  # no node would be left
    assert seldom.variables(1, ("n2",)) == {}
    seldom.look(late, starting("n1", "n2"))
    told.wait("standby_ready")
    told.lines.clear()
    seldom.look(late, starting("n1", "n2"))
    assert seldom.variables(1, ("n2",))
    assert told.lines == []


def suspected_beside_those_that_wait(made, told):
    """Have standbys wait on n1, and others start without it."""
    made.look(step(1), training())
    told.wait("standby_ready")
    made.look(on.Suspected(at=1.0, nodes=("n1",)), starting("n1", "n2"))
    until(lambda: [name for name, _ in told.lines].count("standby_ready") == 2)


def test_a_watcher_that_is_late_for_a_moment_costs_no_standby_that_waits(made, told):
    suspected_beside_those_that_wait(made, told)

    assert made.variables(1, NODES)[standbys.VARIABLE].endswith("/standby-1-ranks")


def test_those_without_the_lost_node_serve_the_launch_without_it(made, told):
    suspected_beside_those_that_wait(made, told)

    assert made.variables(1, ("n2",))[standbys.VARIABLE].endswith("/standby-2-ranks")
    assert made.variables(2, NODES) == {}


def test_a_look_that_ends_no_launch_starts_none(seldom, told):
    """A script without the library that has printed no step may sleep for as long as it likes."""
    silent = training()
    seldom.look(ASLEEP, msgspec.structs.replace(silent, launch=msgspec.structs.replace(silent.launch, step=None)))

    assert seldom.variables(1, NODES) == {}
    assert told.lines == []


def until(condition):
    limit = time.monotonic() + WITHIN_S
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.02)


def test_where_the_late_node_is_back_its_launch_has_none(seldom, told):
    seldom.look(on.Suspected(at=1.0, nodes=("n1",)), starting("n1", "n2"))
    told.wait("standby_ready")

    assert seldom.variables(1, NODES) == {}


@pytest.mark.parametrize(
    "state",
    [State(phase=Phase.CLOSING), training(plan=Plan(next=Next.REQUEUE, why="a notice")), State(phase=Phase.DONE)],
    ids=["closing", "before a requeue", "done"],
)
def test_they_leave_before_the_job_does(fake, tmp_path, told, state):
    wanted = job(tmp_path)
    made = fake(wanted, {**os.environ, "PYTHONPATH": str(tmp_path)})
    made.look(step(1), training())
    told.wait("standby_ready")

    made.look(on.Tick(at=2.0), state)

    until(lambda: not alive(wanted.socket))
    assert "standby_ended" not in [name for name, _ in told.lines]


def test_one_that_cannot_import_torch_is_told_and_training_goes_on(made, told, tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('no torch here')")

    made.look(step(1), training())

    assert told.wait("standby_gone")["why"] == "ImportError: no torch here"


def test_a_refusal_is_told(made, told):
    """Where torchrun or an own srun line starts the ranks, no wrapper reports it."""
    made.look(step(1), training())
    told.wait("standby_ready")
    place = made.variables(1, NODES)[standbys.VARIABLE].replace("%N", "n1")
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(WITHIN_S)
        sock.connect(f"\0{place[1:]}/0")
        sock.sendall(b'{"prefix": ["perl"], "executable": ""}\n')
        assert b"refused" in sock.recv(1000)

    assert told.wait("standby_refused")["why"] == f"it runs {sys.executable}, not perl"


TORCHRUN = "#!{python}\nprint()\n"


@pytest.mark.parametrize(
    ("line", "agent"),
    [
        ("torchrun --nproc-per-node=1 train.py", {standbys.PYTHON: sys.executable}),
        ("PYTHON -m torch.distributed.run --nproc-per-node=1 -m train", {standbys.WORDS: "1"}),
        ("srun --ntasks=1 --label env A=1 PYTHON train.py", {}),
    ],
)
def test_ranks_that_others_start_hand_over_themselves(fake, tmp_path, told, line, agent):
    """A rank of such a launch, started as the launch would, is taken over; PYTHONPATH is the user's again."""
    torchrun = tmp_path / "bin" / "torchrun"
    torchrun.write_text(TORCHRUN.format(python=sys.executable))
    torchrun.chmod(0o755)
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:/theirs:"}
    wanted = job(tmp_path, *line.replace("PYTHON", sys.executable).split())
    made = fake(wanted, environment)
    made.look(step(1), training())
    told.wait("standby_ready")
    if agent:
        told.wait("standby_of_torchrun_ready")
    script = tmp_path / "train.py"
    script.write_text("import os\nprint(os.environ['PYTHONPATH'])\nraise SystemExit(7)")
    meeting = launch.Meeting(launch=1, nodes=NODES, address="n1", port=1, resume_from=None)
    found = made.variables(1, NODES)
    theirs = launch.launch_environment(wanted, meeting, environment | found)
    assert found.pop(standbys.VARIABLE, "").endswith("agents") == bool(agent)
    assert {name: value for name, value in found.items() if name in (standbys.PYTHON, standbys.WORDS)} == agent

    done = subprocess.run(
        [sys.executable, *(["-u"] if agent else []), str(script)],
        env=theirs | {"LOCAL_RANK" if agent else "SLURM_LOCALID": "0", "SLURMD_NODENAME": "n1"},
        capture_output=True,
        text=True,
        timeout=WITHIN_S,
        check=False,
    )

    assert (done.returncode, done.stdout, done.stderr) == (7, f"{tmp_path}:/theirs:\n", "")
    assert told.wait("standby_taken") == {"launch": 1, "ranks": 1}


@pytest.mark.parametrize(
    ("command", "why"),
    [
        (
            ("accelerate", "launch", "train.py"),
            "CMD starts ranks itself, and is not `torchrun OPTIONS script.py`",
        ),
        (
            ("srun", "-n2", "bash", "-c", "python train.py"),
            "CMD is an own srun line, and not `srun OPTIONS [env NAME=VALUE] python script.py`",
        ),
        (("bash", "-c", "python train.py"), "CMD is not `python script.py` or `python -m module`"),
    ],
)
def test_a_command_that_nothing_can_stand_in_for_is_told_once(tmp_path, told, command, why):
    made = standbys.Standbys(job(tmp_path, *command), {}, always=True, inbox=Inbox(Clock()), log=told)

    made.look(step(1), training())

    assert told.lines == [("standby_impossible", {"why": why})]
    assert made.variables(1, NODES) == {}
