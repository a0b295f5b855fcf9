"""The pyslurm client where pyslurm misbehaves: missing, dying, silent; and which client is chosen then.

The programs here stand in for an interpreter with pyslurm; the real one is in `test_contract.py`, on a live cluster.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from stepkeeper.core.events import JobFacts, JobState
from stepkeeper.slurm import pyslurm_child
from stepkeeper.slurm.client import ClusterSettings, SlurmError
from stepkeeper.slurm.pyslurm_client import ClientKind, PyslurmClient, choose

CAPTURED = Path(__file__).parent / "captured"
NO_SUCH_JOB = "Invalid job id specified"
# a pyslurm of our own, below the real child program: what it tells is that of the captured commands
PYSLURM = """
import os, types
class RPCError(Exception):
    def __init__(self, errno, words):
        super().__init__(words)
        self.errno = errno
class Job:
    def __init__(self, job):
        self.id = job
    @staticmethod
    def load(job):
        if job == 404:
            raise RPCError(2017, "Invalid job id specified")
        if job == 666:
            os.abort()
        found = Job(2 if job == 20 else job)
        found.__dict__.update(
            state="RUNNING", state_reason="a b", requeue_count=1, preempt_time=None, end_time=1826772929,
            time_limit=10, is_requeueable=True, is_batch_job=True, excluded_nodes=None,
            required_nodes=None,
        )
        return found
    def requeue(self):
        print("a library's own words")
        with open(os.environ["ORDERS"], "a") as orders:
            orders.write("requeue\\n")
        if self.id == 666:
            os._exit(3)
        if self.id == 1800:
            raise RPCError(1800, "Unable to contact slurm controller")
class _Config:
    accounting_storage_type = "accounting_storage/none"
    kill_wait_time, version = 10, os.environ.get("SAYS_VERSION", "22.05.8")
slurmctld = types.SimpleNamespace(Config=types.SimpleNamespace(load=_Config))
"""

LAUNCHER = """
import runpy, sys
sys.path.insert(0, {modules!r})
runpy.run_path(sys.argv[1], run_name="__main__")
"""


@pytest.fixture
def python(tmp_path, monkeypatch) -> str:
    """An interpreter that finds our pyslurm even when isolated, as one of a site would find its own."""
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "pyslurm.py").write_text(PYSLURM)
    monkeypatch.setenv("ORDERS", str(tmp_path / "orders"))
    launcher = tmp_path / "launcher.py"
    launcher.write_text(LAUNCHER.format(modules=str(tmp_path / "modules")))
    script = tmp_path / "python"
    script.write_text(f'#!/bin/sh\nexec {sys.executable} "$1" {launcher} "$2"\n')  # $1 is -I
    script.chmod(0o755)
    return str(script)


@pytest.fixture
def client(python):
    client = PyslurmClient(python=python, call_within_s=60.0)
    yield client
    client.close()


def commands(tmp_path, monkeypatch, body: str) -> None:
    script = tmp_path / "scontrol"
    script.write_text(f"#!/bin/sh\n{body}\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")


def orders(tmp_path) -> list[str]:
    return (tmp_path / "orders").read_text().split()


def test_what_pyslurm_tells_of_a_job(client):
    assert client.job("7") == JobFacts(
        state=JobState.RUNNING,
        slurm_state="RUNNING",
        restarts=1,
        reason="a_b",
        preempt_at=None,
        end_at=1826772929.0,
        requeue_allowed=True,
    )
    assert client.job_runs("7") is True


def test_what_a_library_prints_is_no_answer(client, tmp_path):
    client.requeue("7")

    assert client.settings() == ClusterSettings(kill_wait_s=10.0, version="22.05.8", accounting=False)
    assert orders(tmp_path) == ["requeue"]


def test_a_job_that_slurm_has_forgotten_does_not_run(client):
    with pytest.raises(SlurmError, match=NO_SUCH_JOB) as failure:
        client.job("404")

    assert not failure.value.unreachable
    assert client.job_runs("404") is False


def test_a_silent_controller_is_unreachable(client):
    with pytest.raises(SlurmError, match="Unable to contact") as failure:
        client.requeue("1800")

    assert failure.value.unreachable


def test_the_leader_of_an_array_is_asked_of_the_commands(client, tmp_path, monkeypatch):
    """Asked for a leader, pyslurm tells of any task."""
    commands(tmp_path, monkeypatch, f"cat {CAPTURED / 'requeued.txt'}")

    assert client.job("20").state is JobState.COMPLETING


def test_an_order_whose_process_died_is_never_given_twice(client, tmp_path):
    with pytest.raises(SlurmError, match="its process ended with 3") as failure:
        client.requeue("666")

    assert failure.value.unreachable
    assert orders(tmp_path) == ["requeue"]
    assert client.job("7").restarts == 1


def test_a_question_that_always_kills_the_process_is_no_endless_loop(client):
    with pytest.raises(SlurmError, match="its process ended with -6"):
        client.job("666")


def test_an_answer_that_does_not_come_costs_the_time_limit_and_the_process(tmp_path):
    script = tmp_path / "python"
    script.write_text("#!/bin/sh\nexec sleep 60\n")
    script.chmod(0o755)
    client = PyslurmClient(python=str(script), call_within_s=0.3)
    began = time.monotonic()

    with pytest.raises(SlurmError, match=r"no answer in 0\.3 s") as failure:
        client.job("7")

    assert failure.value.unreachable
    assert time.monotonic() - began < 30.0, "it did not wait for the interpreter's own end"
    assert client.pid is None


@pytest.mark.parametrize(
    ("limit_min", "end", "shown"),
    [(10, 2e9, 2e9), (None, 4e9, None), (None, 1e9, 1e9), (0xFFFFFFFF, 4e9, None), (10, None, None)],
)
def test_the_end_of_a_job_is_shown_as_slurms_commands_do(limit_min, end, shown):
    assert pyslurm_child.end_at(end, limit_min) == shown


@pytest.mark.parametrize("no_time", [None, 0, 0xFFFFFFFE, 0xFFFFFFFF, "UNLIMITED"])
def test_what_stands_for_no_time(no_time):
    assert pyslurm_child.instant(no_time) is None


# --- which client ---------------------------------------------------------------------------------


def test_the_commands_are_chosen_by_default_without_a_call(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")

    assert choose().kind is ClientKind.COMMANDS


def test_pyslurm_is_chosen_where_it_tells_the_same(python, tmp_path, monkeypatch):
    commands(tmp_path, monkeypatch, f"cat {CAPTURED / 'config.txt'}")

    choice = choose(ClientKind.PYSLURM, python=python)

    assert choice.kind is ClientKind.PYSLURM
    assert isinstance(choice.client, PyslurmClient)
    choice.client.close()


def test_a_pyslurm_that_tells_otherwise_is_left_with_the_reason(python, tmp_path, monkeypatch):
    commands(tmp_path, monkeypatch, f"cat {CAPTURED / 'config.txt'}")
    monkeypatch.setenv("SAYS_VERSION", "25.11.0")

    choice = choose(ClientKind.PYSLURM, python=python)

    assert choice.kind is ClientKind.COMMANDS
    assert "25.11.0" in choice.why


def test_without_pyslurm_the_commands_are_chosen(tmp_path, monkeypatch):
    commands(tmp_path, monkeypatch, f"cat {CAPTURED / 'config.txt'}")

    choice = choose(ClientKind.PYSLURM)

    assert choice.kind is ClientKind.COMMANDS
    assert "No module named 'pyslurm'" in choice.why


def test_a_pyslurm_that_tells_otherwise_of_our_job_is_left(python, tmp_path, monkeypatch):
    commands(
        tmp_path,
        monkeypatch,
        f'case "$*" in *config*) cat {CAPTURED}/config.txt;; *) cat {CAPTURED}/requeued.txt;; esac',
    )

    choice = choose(ClientKind.PYSLURM, job="7", python=python)

    assert choice.kind is ClientKind.COMMANDS
    assert "of job 7" in choice.why
