"""A real watcher process whose supervisor is slow, cut off, or lost: what it does to the ranks and to the job.

Slurm's command is a script below the real client; the limits of `core.liveness` are a twentieth of the real ones.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from stepkeeper.watcher import messages as bus
from stepkeeper_trainer.formats import lease, messages
from tests.supervisor.assignments import assigned

NODE = "n1"
WITHIN_S = 60.0
SHORT = """
import sys
from stepkeeper.core import liveness
liveness.SUSPECT_AFTER_S, liveness.GONE_AFTER_S = 0.6, 3.0
from stepkeeper.watcher import main
main.BUS_BACK_WITHIN_S, main.ACKNOWLEDGE_WITHIN_S, main.PROBE_EVERY_S, main.RESCUE_AGAIN_S = 0.5, 0.3, 0.3, 0.3
main.ALIVE_EVERY_S = 0.2
sys.exit(main.main())
"""
SCONTROL = """\
#!/bin/sh
echo "$@" >> "$LAB/called"
case "$*" in
*"show job"*) while [ -e "$LAB/hangs" ]; do sleep 0.05; done
    [ -e "$LAB/away" ] && { echo "Unable to contact slurm controller" >&2; exit 1; }
    cat "$LAB/job" ;;
esac
"""
JOB = (
    "JobId=7 JobName=x UserId=u(1) GroupId=g(1) Priority=1 JobState={} Reason={} Requeue=1 Restarts=0 BatchFlag=1 "
    "EndTime=4000000000 PreemptTime=None ExcNodeList=(null) ReqNodeList=(null)\n"
)
RUNNING, KILLED = JOB.format("RUNNING", "None"), JOB.format("COMPLETING", "JobLaunchFailure")


class Node:
    """One watcher, one rank, and what the supervisor and Slurm would do."""

    def __init__(self, place: Path) -> None:
        self.place, self.run_dir = place, place / "run"
        (self.run_dir / "checkpoints").mkdir(parents=True)
        lease.write(self.run_dir, lease.Lease(job_id=7, restart_count=0, attempt=0, node=NODE, pid=1, taken_at=0.0))
        (place / "scontrol").write_text(SCONTROL)
        (place / "scontrol").chmod(0o755)
        self.slurm_says(RUNNING)
        run_id, nonce = place.name + str(os.getpid()), os.urandom(4).hex()
        assignment = assigned(self.run_dir, run_id=run_id, nodes=(NODE,), nonce=nonce)
        path = f"{place}:{os.environ['PATH']}"
        environment = {**os.environ, "PATH": path, "LAB": str(place), "SLURMD_NODENAME": NODE}
        self.errors = (place / "errors").open("w")
        self.watcher = subprocess.Popen(
            [sys.executable, "-c", SHORT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors,
            env={**environment, **assignment.environment()},
        )  # fmt: skip
        self.words: list[bus.FromWatcher] = []
        self.reading = threading.Thread(target=self._read, daemon=True)
        self.reading.start()
        self.until(lambda: any(isinstance(word, bus.Ready) for word in self.words), "the watcher")
        self.rank = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.rank.bind("")
        hello = messages.Hello(launch="0.0", rank=0, pid=os.getpid(), world_size=1, version="0")
        self.rank.sendto(messages.encode(hello), "\0" + assignment.socket_name(NODE)[1:])
        self.until(lambda: any(isinstance(word, bus.Rank) for word in self.words), "the rank's word")
        self.lives()
        self.writes = threading.Event()
        self.closed = threading.Event()
        self.writing = threading.Thread(target=self._write, daemon=True)
        self.writing.start()

    def _read(self) -> None:
        assert self.watcher.stdout is not None
        for line in self.watcher.stdout:
            word = bus.decode_from_watcher(line)
            if word is not None:
                self.words.append(word)

    def _write(self) -> None:
        """Write the status as a supervisor does, while it `writes`."""
        number = 0
        while not self.closed.wait(0.1):
            if self.writes.is_set():
                number += 1
                (self.run_dir / "new").write_text(str(number))
                (self.run_dir / "new").rename(self.run_dir / "status.json")

    def lives(self) -> None:
        """The supervisor renews its lease over the bus."""
        assert self.watcher.stdin is not None
        self.watcher.stdin.write(bus.encode(bus.Lease(seconds=30.0, launch=0)))
        self.watcher.stdin.flush()

    def slurm_says(self, job: str) -> None:
        (self.place / "new").write_text(job)
        (self.place / "new").rename(self.place / "job")

    def called(self) -> list[str]:
        path = self.place / "called"
        return path.read_text().splitlines() if path.exists() else []

    def requeued(self) -> bool:
        return any(call.startswith("requeue") for call in self.called())

    def requests(self) -> list[messages.SaveRequest]:
        """Return what the rank was asked for since the last time."""
        found = []
        while select.select([self.rank], [], [], 0)[0]:
            request = messages.decode_to_rank(self.rank.recv(65536))
            assert isinstance(request, messages.SaveRequest)
            found.append(request)
        return found

    def until(self, condition: Callable[[], bool], what: str) -> None:
        limit = time.monotonic() + WITHIN_S
        while not condition():
            assert time.monotonic() < limit, f"{what}: {self.words} {self.called()} {self.said()}"
            assert self.watcher.poll() is None or condition(), f"{what}: the watcher ended: {self.said()}"
            time.sleep(0.02)

    def said(self) -> str:
        return (self.place / "errors").read_text()

    def spend(self, seconds: float) -> None:
        """Let it be for a while: nothing is to happen."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            assert self.watcher.poll() is None, self.said()
            time.sleep(0.05)

    def close(self) -> None:
        self.closed.set()
        self.writing.join(WITHIN_S)
        (self.place / "hangs").unlink(missing_ok=True)
        self.watcher.kill()
        self.watcher.wait(WITHIN_S)
        self.errors.close()
        self.rank.close()


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    made = Node(tmp_path)
    yield made
    made.close()


def test_a_bus_that_is_cut_costs_a_living_run_nothing(node: Node) -> None:
    """Its srun is gone, a stray SIGTERM comes, and Slurm is away: the supervisor writes to the run directory."""
    (node.place / "away").touch()
    node.writes.set()
    node.spend(0.3)
    assert node.watcher.stdin is not None
    node.watcher.stdin.close()
    node.spend(4.0)  # longer than it takes to be gone
    node.watcher.send_signal(signal.SIGTERM)
    node.spend(1.0)

    assert [request for request in node.requests() if request.stop] == []
    assert not node.requeued()


def test_a_lease_that_is_late_on_one_node_does_not_requeue_the_job(node: Node) -> None:
    """The supervisor writes, so it is only this node that is cut off; once it writes no more, it is gone."""
    node.writes.set()
    node.spend(4.0)
    assert node.requests() == []
    assert not node.requeued()

    node.writes.clear()
    node.until(node.requeued, "the requeue")
    select.select([node.rank], [], [], WITHIN_S)  # a request that is on its way

    assert [request.stop for request in node.requests()] == [True]


def test_a_loss_after_a_false_alarm_is_saved_like_the_first(node: Node) -> None:
    node.watcher.send_signal(signal.SIGTERM)
    node.until(lambda: "may only be slow" in node.said(), "the first look")
    node.lives()
    node.spend(0.3)
    assert node.requests() == []

    node.slurm_says(KILLED)
    node.watcher.send_signal(signal.SIGTERM)
    node.until(node.requeued, "the requeue")

    asked = node.requests()
    assert [(request.stop, request.why) for request in asked] == [(True, "the supervisor is lost")]
    assert node.watcher.wait(WITHIN_S) == 0


def test_what_was_written_before_slurms_signal_proves_no_life_after_it(node: Node) -> None:
    """The bus breaks, the supervisor goes on for a moment and is killed then: its newest words must not save it."""
    node.writes.set()
    assert node.watcher.stdin is not None
    node.watcher.stdin.close()
    node.until(lambda: "cut off" in node.said(), "a look")
    node.slurm_says(KILLED)
    node.writes.clear()
    node.spend(0.2)
    before = len(node.called())
    node.watcher.send_signal(signal.SIGTERM)
    node.until(lambda: len(node.called()) > before, "the question")

    node.until(node.requeued, "the requeue")
    assert len([call for call in node.called() if "show job" in call]) == 1, "at the first look"
    assert [request.stop for request in node.requests()] == [True]


def test_a_look_that_hangs_is_cancelled_by_one_word_of_the_supervisor(node: Node) -> None:
    """Slurm's answer comes late: meanwhile the watcher hears and speaks, and does nothing about it any more."""
    (node.place / "hangs").touch()
    node.slurm_says(KILLED)
    node.watcher.send_signal(signal.SIGTERM)
    node.until(lambda: any("show job" in call for call in node.called()), "the question")
    before = len(node.words)
    node.until(lambda: len(node.words) >= before + 3, "words of the watcher while it waits for Slurm")
    node.lives()
    node.spend(0.5)
    (node.place / "hangs").unlink()
    node.spend(0.5)

    assert node.requests() == []
    assert not node.requeued()


def test_where_nobody_answers_after_slurms_signal_the_ranks_save_and_go_on(node: Node) -> None:
    """It may be the end of the job, or a stray signal while the controller restarts: a save is right in both cases."""
    (node.place / "away").touch()
    node.watcher.send_signal(signal.SIGTERM)
    asked: list[messages.SaveRequest] = []
    node.until(lambda: bool(asked.extend(node.requests()) or asked), "the save")

    assert [(request.stop, request.deadline_at) for request in asked] == [(False, None)]
    assert not node.requeued()
