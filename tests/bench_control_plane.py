"""What one supervisor costs for many nodes: `python -m tests.bench_control_plane` prints a table.

The supervisor is real: its loop, threads, journal, status and log.  Its `srun` is `tests.crowd`, one process that says
what the watchers and ranks of all nodes say.  So the figures hold our own part; what srun, slurmctld and the network
add is in none of them.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import structlog

from stepkeeper.core import events as on
from stepkeeper.core.policy import Policy
from stepkeeper.core.state import Phase
from stepkeeper.loop_tools import Clock
from stepkeeper.run_store.journal import JournalWriter, Record
from stepkeeper.run_store.paths import RunDirectory
from stepkeeper.slurm.launch import Geometry
from stepkeeper.supervisor.actions.launch import Job
from stepkeeper.supervisor.loop import Setting, Supervisor
from stepkeeper.supervisor.sources.process import Inbox
from stepkeeper.watcher.messages import Assignment
from stepkeeper_trainer.formats.lease import Lease
from tests import crowd

WITHIN_S = 120.0
TRAIN_S = 12.0  # in which the load of a running training is measured


class Journal(JournalWriter):
    """The real one, which also notes how late the loop took each event that reaches it."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.clock: Clock | None = None
        self.records: list[tuple[float, Record]] = []
        self.late: list[float] = []

    def append(self, record: Record) -> None:
        """Note, then write."""
        assert self.clock is not None
        now = self.clock.now()
        self.late.append(now - record.event.at)
        self.records.append((time.monotonic(), record))
        super().append(record)


class Slurm:
    """The controller's answers that a run without troubles needs."""

    def __init__(self) -> None:
        self.requeued_at: float | None = None

    def job(self, _job: str) -> on.JobFacts:
        """Say that the job is about to be preempted."""
        return on.JobFacts(state=on.JobState.RUNNING, slurm_state="RUNNING", restarts=0, preempt_at=time.time())

    def requeue(self, _job: str) -> None:
        """Note when."""
        self.requeued_at = time.monotonic()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """Answer what else is asked with nothing at all."""
        return lambda *_args, **_named: ()


def play(count: int, directory: Path) -> dict[str, float]:
    """Start, train, lose a rank, start again, be preempted; return seconds and bytes."""
    nodes = tuple(f"node{number:05d}" for number in range(count))
    commands = directory / "bin"
    commands.mkdir()
    srun = commands / "srun"
    srun.write_text(f'#!/bin/sh\nPYTHONPATH={":".join(sys.path)} exec {sys.executable} -m tests.crowd "$@"\n')
    srun.chmod(0o755)
    (commands / "scontrol").write_text("#!/bin/sh\nexit 1\n")
    (commands / "scontrol").chmod(0o755)
    notes = directory / "notes"
    environment = dict(os.environ) | {
        "PATH": f"{commands}:{os.environ['PATH']}", crowd.SOCKET: str(directory / "crowd"), crowd.NOTES: str(notes),
    }  # fmt: skip
    os.environ["PATH"] = environment["PATH"]
    run = directory / "run"
    (run / "checkpoints").mkdir(parents=True)
    assignment = Assignment(
        run_directory=str(run), run_id="bench", job_id=7, slurm_name="7", restart_count=0, attempt=0, nodes=nodes,
        kill_wait_s=30, nonce="n",
    )  # fmt: skip
    clock = Clock()
    journal = Journal(RunDirectory(run).journal)
    journal.clock = clock
    slurm = Slurm()
    inbox = Inbox(clock)
    supervisor = Supervisor(
        setting=Setting(
            directory=RunDirectory(run),
            assignment=assignment,
            job=Job(
                command=("train.py",),
                torchrun=False,
                geometry=Geometry(tasks_per_node=crowd.RANKS_PER_NODE),
                run_directory=run,
                run_id="bench",
                attempt=0,
                socket=assignment.socket_name(),
            ),
            lease=Lease(job_id=7, restart_count=0, attempt=0, node=nodes[0], pid=os.getpid(), taken_at=clock.now()),
            policy=Policy(),
        ),
        client=slurm,  # type: ignore[arg-type]
        inbox=inbox,
        journal=journal,
        environment=environment,
        log=structlog.wrap_logger(structlog.PrintLogger(open(os.devnull, "w"))),  # noqa: SIM115
    )
    inbox.put(
        on.AttemptStarted(
            at=clock.now(), job_id=7, restart_count=0, attempt=0, nodes=nodes, batch_node=nodes[0], kill_wait_s=30
        )
    )
    thread = threading.Thread(target=supervisor.run)
    began = time.monotonic()
    thread.start()

    def until(what: Callable[[], bool], name: str) -> None:
        give_up_at = time.monotonic() + WITHIN_S
        while not what():
            if time.monotonic() > give_up_at:
                raise TimeoutError(f"{name}: {supervisor.state.phase}, {supervisor.state.timers}")
            time.sleep(0.002)

    def trains(number: int) -> bool:
        state = supervisor.state
        return state.launch.number == number and state.phase is Phase.TRAINING and bool(state.launch.step)

    until(lambda: trains(0), "the first step")
    used, at = time.process_time(), time.monotonic()
    since = len(journal.late)
    time.sleep(TRAIN_S)
    busy = (time.process_time() - used) / (time.monotonic() - at)
    while_training = journal.late[since:]
    Path(str(notes) + ".fail").touch()
    until(lambda: trains(1), "the launch after a lost rank")
    signaled = time.monotonic()
    inbox.put(on.SignalReceived(at=clock.now(), signal="TERM"))
    until(lambda: slurm.requeued_at is not None, "the requeue")
    thread.join(WITHIN_S)
    seen = Seen(notes)
    starts = [at for at, record in journal.records if record.event.__struct_config__.tag == "nodes_cleared"]
    assert slurm.requeued_at is not None
    late = sorted(journal.late)
    return {
        "all ready": seen.first("clear asked") - seen.first("ready begins"),
        "of that, the crowd's own": seen.first("ready said") - seen.first("ready begins"),
        "clear and fit": starts[0] - seen.first("clear asked"),
        "of that, the crowd's own ": seen.first("clear said") - seen.first("clear asked"),
        "start to first step": seen.first("launch begins") - began,
        "lost rank to kill": seen.first("kill asked") - seen.first("rank fails"),
        "lost rank to launch": seen.last("launch begins") - seen.first("rank fails"),
        "notice to asked": seen.after("save asked", signaled) - signaled,
        "ranks gone to requeue": slurm.requeued_at - seen.last("ranks left"),
        "loop late, 99th percentile": late[int(0.99 * (len(late) - 1))],
        "loop late in training, worst": max(while_training, default=0.0),
        "of one core in training": busy,
        "memory, MiB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "journal, KiB": RunDirectory(run).journal.stat().st_size / 1024,
    }


class Seen:
    """What the crowd noted."""

    def __init__(self, path: Path) -> None:
        self._notes = [json.loads(line) for line in path.read_text().splitlines()]

    def _all(self, what: str) -> list[float]:
        return [note["at"] for note in self._notes if note["what"] == what]

    def first(self, what: str) -> float:
        """Return when it happened first."""
        return self._all(what)[0]

    def last(self, what: str) -> float:
        """Return when it happened last."""
        return self._all(what)[-1]

    def after(self, what: str, at: float) -> float:
        """Return when it happened first after an instant."""
        return next(each for each in self._all(what) if each >= at)


def main() -> int:
    """Measure each number of nodes in a process of its own, and print medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", default="64,1024,10000")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.one:
        with tempfile.TemporaryDirectory() as directory:
            print(json.dumps(play(chosen.one, Path(directory))), flush=True)
        os._exit(0)  # threads of sruns may wait for one that is gone
    counts = [int(word) for word in chosen.nodes.split(",")]
    found: dict[int, list[dict[str, float]]] = {count: [] for count in counts}
    for _ in range(chosen.rounds):
        for count in counts:
            command = [sys.executable, "-m", "tests.bench_control_plane", "--one", str(count)]
            said = subprocess.run(command, stdout=subprocess.PIPE, check=True, timeout=5 * WITHIN_S).stdout
            found[count].append(json.loads(said))
    load = f"load {os.getloadavg()[0]:.1f}"
    print(f"{os.cpu_count()} CPUs, {load}, medians of {chosen.rounds}, {crowd.RANKS_PER_NODE} ranks a node\n")
    print("| seconds | " + " | ".join(f"{count:,} nodes" for count in counts) + " |")
    print("|---" * (1 + len(counts)) + "|")
    for name in found[counts[0]][0]:
        medians = (statistics.median(each[name] for each in found[count]) for count in counts)
        print(f"| {name} | " + " | ".join(f"{median:.3g}" for median in medians) + " |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
