"""Which processes of a launch get the stop signal: real ones, with real handlers, as `/proc` shows them."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from stepkeeper import wrapper
from stepkeeper.watcher import stop_signal
from stepkeeper.watcher.stop_signal import Process, choose

NODE = "n1"
WITHIN_S = 60.0
# says that its handler is there, then waits; what it gets is written, and ends it
HANDLER = """\
import os, signal, sys, time
name, out = sys.argv[1], sys.argv[2]
def handle(number, frame):
    with open(out, "a") as file:
        file.write(f"{name} {signal.Signals(number).name}\\n")
    os._exit(0)
for number in (signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, handle)
open(f"{out}.{name}", "w").close()
time.sleep(600)
"""
# as torchrun: it catches SIGTERM, and starts ranks with a RANK of their own
LAUNCHER = """\
import os, signal, subprocess, sys
signal.signal(signal.SIGTERM, lambda *_: os._exit(99))
workers = [
    subprocess.Popen([sys.executable, "-c", os.environ["HANDLER"], f"worker{rank}", sys.argv[1]],
                     env={**os.environ, "RANK": str(rank), "TORCHELASTIC_RUN_ID": "r"})
    for rank in range(2)
]
sys.exit(max(worker.wait() for worker in workers))
"""


class Launch:
    """Tasks of a launch on one node, each below a wrapper or, as of an own srun line, without one."""

    def __init__(self, place: Path) -> None:
        self.place, self.run_id, self.out = place, secrets.token_hex(6), place / "handled"
        self.tasks: list[subprocess.Popen[bytes]] = []

    def start(self, *command: str, wrapped: bool = True, agent: bool = False) -> subprocess.Popen[bytes]:
        rank = str(len(self.tasks))
        environment = {
            "PATH": os.environ["PATH"], "HANDLER": HANDLER, "SLURM_PROCID": rank, "SLURM_LOCALID": rank,
            "SLURM_NTASKS": "2", "SLURMD_NODENAME": NODE, "STEPKEEPER_TASKS_PER_NODE": "2",
            "STEPKEEPER_RUN_ID": self.run_id, "STEPKEEPER_ATTEMPT": "0", "STEPKEEPER_LAUNCH": "0",
        }  # fmt: skip
        options = ["--agent"] if agent else []
        around = [sys.executable, "-I", "-S", wrapper.__file__, *options, "--"] if wrapped else []
        self.tasks.append(subprocess.Popen([*around, *command], env=environment))
        return self.tasks[-1]

    def handler(self, name: str) -> tuple[str, ...]:
        return (sys.executable, "-c", HANDLER, name, str(self.out))

    def wait_ready(self, *names: str) -> None:
        limit = time.monotonic() + WITHIN_S
        while not all(Path(f"{self.out}.{name}").exists() for name in names):
            assert time.monotonic() < limit, names
            time.sleep(0.01)

    def send(self, name: str, *heard: int) -> list[Process]:
        return stop_signal.send_stop_signal(self.run_id, NODE, name, attempt_max=0, with_library=heard)

    def pids(self) -> list[int]:
        return sorted(stop_signal.look(self.run_id, NODE, attempt_max=0, number=15))

    def handled(self) -> list[str]:
        return sorted(self.out.read_text().splitlines()) if self.out.exists() else []


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    made = Launch(tmp_path)
    yield made
    for pid in made.pids():
        os.kill(pid, signal.SIGKILL)
    for task in made.tasks:
        task.wait(WITHIN_S)


def test_a_rank_with_a_handler_gets_the_signal_and_its_wrapper_does_not(launch: Launch) -> None:
    task = launch.start(*launch.handler("rank"))
    launch.wait_ready("rank")

    sent = launch.send("USR1")

    assert task.wait(WITHIN_S) == 0
    assert launch.handled() == ["rank SIGUSR1"]
    assert [(each.caught, each.ignored) for each in sent] == [(True, False)]
    assert "ends" not in stop_signal.in_words("USR1", sent)


def test_a_rank_without_a_handler_is_ended_by_it(launch: Launch) -> None:
    """Nobody can save: its node is free sooner."""
    task = launch.start("sleep", "600")
    launch.wait_ready()
    while len(launch.pids()) < 2:
        time.sleep(0.01)

    sent = launch.send("TERM")

    assert task.wait(WITHIN_S) == -signal.SIGTERM
    assert "it ends all of them at once" in stop_signal.in_words("TERM", sent)


def test_a_launchers_ranks_get_it_and_the_launcher_does_not(launch: Launch) -> None:
    task = launch.start(sys.executable, "-c", LAUNCHER, str(launch.out), agent=True)
    launch.wait_ready("worker0", "worker1")

    launch.send("TERM")

    assert task.wait(WITHIN_S) == 0, "the launcher's own handler ends with 99"
    assert launch.handled() == ["worker0 SIGTERM", "worker1 SIGTERM"]


def test_a_shell_without_a_trap_is_passed_over_and_its_pipe_stays_whole(launch: Launch) -> None:
    line = f'"$@" | cat > {launch.place}/log; exit 0'
    task = launch.start("bash", "-c", line, "bash", *launch.handler("piped"))
    launch.wait_ready("piped")

    sent = launch.send("TERM")

    assert task.wait(WITHIN_S) == 0
    assert launch.handled() == ["piped SIGTERM"]
    assert len(sent) == 1


def test_a_shell_with_a_trap_has_it_for_what_it_runs(launch: Launch) -> None:
    line = (
        f"trap 'echo shell SIGTERM >> {launch.out}; kill $!; exit 3' TERM; touch {launch.out}.shell; sleep 600 & wait"
    )
    task = launch.start("bash", "-c", line, wrapped=False)
    launch.wait_ready("shell")

    launch.send("TERM")

    assert task.wait(WITHIN_S) == 3
    assert launch.handled() == ["shell SIGTERM"]


def test_ranks_with_the_library_and_what_started_them_are_left_alone(launch: Launch) -> None:
    """Of two workers of one launcher, one has the library; beside them runs a rank that has none."""
    started = launch.start(sys.executable, "-c", LAUNCHER, str(launch.out), agent=True)
    other = launch.start(*launch.handler("other"))
    launch.wait_ready("worker0", "worker1", "other")
    heard = next(pid for pid in launch.pids() if b"\0worker0\0" in Path(f"/proc/{pid}/cmdline").read_bytes())

    sent = launch.send("TERM", heard)

    assert other.wait(WITHIN_S) == 0
    limit = time.monotonic() + WITHIN_S  # the worker is no child of ours: its line says that it is over
    while len(launch.handled()) < 2 and time.monotonic() < limit:
        time.sleep(0.01)
    assert launch.handled() == ["other SIGTERM", "worker1 SIGTERM"]
    assert heard not in [each.pid for each in sent]
    assert started.poll() is None


def test_nothing_of_another_run_gets_it(launch: Launch) -> None:
    launch.start(*launch.handler("rank"))
    launch.wait_ready("rank")

    assert stop_signal.send_stop_signal("another", NODE, "TERM", attempt_max=0, with_library=()) == []
    assert stop_signal.send_stop_signal(launch.run_id, "n2", "TERM", attempt_max=0, with_library=()) == []
    assert launch.handled() == []


def test_what_a_rank_has_forked_is_a_part_of_it() -> None:
    """A data loader's workers catch SIGTERM, and a script without a handler is ended as a whole."""
    rank = frozenset((b"RANK=",))
    processes = [
        Process(pid=1, parent=0, name="python", ignored=True),  # the wrapper
        Process(pid=2, parent=1, name="python", marks=rank),
        Process(pid=3, parent=2, name="pt_data_worker", caught=True, marks=rank),
        Process(pid=4, parent=2, name="python", marks=frozenset()),  # an evaluation, which is no rank
    ]

    assert choose({each.pid: each for each in processes}, ()) == [2]
    assert choose({each.pid: each for each in processes}, (3,)) == []


def test_an_srun_line_of_the_user_is_no_rank(launch: Launch, tmp_path: Path) -> None:
    """SIGTERM has srun kill all ranks at once."""
    fake = tmp_path / "srun"  # the name is what it is known by
    fake.symlink_to("/bin/sleep")
    launch.start(str(fake), "600", wrapped=False)
    launch.start(*launch.handler("rank"), wrapped=False)
    launch.wait_ready("rank")

    launch.send("TERM")

    assert launch.tasks[1].wait(WITHIN_S) == 0
    assert launch.tasks[0].poll() is None
    launch.tasks[0].kill()
