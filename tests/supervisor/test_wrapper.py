"""The wrapper around a rank: Slurm's early SIGTERM ends nobody, and the end is told and mirrored."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from stepkeeper import wrapper
from stepkeeper_trainer.formats import messages


@pytest.fixture
def watcher(tmp_path):
    """The ranks' side of a watcher: a datagram socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(str(tmp_path / "socket-n1"))
        sock.settimeout(60)
        yield sock


def start(tmp_path, *command, agent=False, address=None):
    environment = {
        "PATH": os.environ["PATH"],
        "SLURM_PROCID": "3",
        "SLURM_LOCALID": "1",
        "SLURM_NTASKS": "8",
        "SLURMD_NODENAME": "n1",
        "STEPKEEPER_TASKS_PER_NODE": "2",
        "STEPKEEPER_ATTEMPT": "4",
        "STEPKEEPER_LAUNCH": "5",
        "STEPKEEPER_SOCKET": address if address is not None else f"{tmp_path}/socket-%N",
    }
    options = ["--agent"] if agent else []
    return subprocess.Popen(
        [sys.executable, "-I", "-S", wrapper.__file__, *options, "--", *command],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def heard(watcher):
    return messages.decode_from_rank(watcher.recv(2000))


def test_sigterm_ends_nobody_and_the_exit_code_is_told(tmp_path, watcher):
    """At a preemption Slurm sends SIGTERM to the direct child at the very start of the grace time."""
    process = start(tmp_path, "sh", "-c", "echo ready; sleep 1; exit 7")
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"

    process.send_signal(signal.SIGTERM)
    code = process.wait(60)

    started, exited = heard(watcher), heard(watcher)
    assert code == 7
    assert (started.rank, started.local_rank, started.launch) == (3, 1, "4.5")
    assert (exited.rank, exited.code, exited.signal) == (3, 7, None)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT])
def test_a_death_by_signal_is_mirrored(tmp_path, watcher, number):
    """srun must see what the rank died of."""
    process = start(tmp_path, "sh", "-c", f"kill -{int(number)} $$")

    assert process.wait(60) == -number
    heard(watcher)
    assert heard(watcher).signal == number


def _ignored(status: str) -> set[int]:
    line = next(line for line in status.splitlines() if line.startswith("SigIgn"))
    mask = int(line.split()[1], 16)
    return {number for number in range(1, 32) if mask >> (number - 1) & 1}  # 32 and above belong to the C library


def test_what_torch_expects_is_there_and_signals_are_as_at_birth(tmp_path, watcher):
    """A rank must not inherit what only the wrapper wants: ignored signals."""
    code = "import json, os; print(json.dumps([dict(os.environ), open('/proc/self/oom_score_adj').read()]))"
    process = start(tmp_path, "/bin/cat", "/proc/self/status")
    assert process.stdout is not None
    ignored = _ignored(process.stdout.read())
    process.wait(60)
    own = _ignored(Path("/proc/self/status").read_text())  # SIGINT and SIGQUIT, where the tests run in the background
    of_python = {signal.SIGPIPE, signal.SIGXFSZ}  # which Python gives back to its children
    assert ignored <= own - of_python

    process = start(tmp_path, sys.executable, "-c", code)
    environment, adj = json.loads(process.communicate(timeout=60)[0])

    assert [environment[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")] == [
        "3",
        "1",
        "8",
        "2",
    ]
    assert environment["STEPKEEPER_SOCKET"] == f"{tmp_path}/socket-n1"
    own_adj = int(Path("/proc/self/oom_score_adj").read_text())  # a container may have a higher one, not to be lowered
    assert int(adj) == max(own_adj, wrapper.OOM_SCORE_ADJ)
    assert watcher


def test_an_agent_gets_no_rank(tmp_path, watcher):
    """torchrun numbers its own ranks."""
    process = start(tmp_path, "sh", "-c", "echo ${RANK:-none} $PET_LOCAL_ADDR", agent=True)

    rank, address = process.communicate(timeout=60)[0].split()

    assert rank == "none"
    assert address
    assert heard(watcher)


def test_a_command_that_is_not_there_is_named(tmp_path):
    process = start(tmp_path, "no-such-command", address="")

    _, said = process.communicate(timeout=60)

    assert process.returncode == 127
    assert "no-such-command" in said


def test_a_failure_is_told_to_a_watcher_that_comes_back(tmp_path):
    """The bus is being restarted: the word must not be lost, for the other ranks hang until somebody knows."""
    ends = tmp_path / "ends"
    process = start(tmp_path, "sh", "-c", f"touch {ends}; exit 3")
    limit = time.monotonic() + 60
    while not ends.exists():
        assert time.monotonic() < limit, "the command was not started"
        time.sleep(0.02)
    time.sleep(2)  # the start, and the first words of the end, have been told to nobody by then
    assert process.poll() is None

    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as late:
        late.bind(str(tmp_path / "socket-n1"))
        late.settimeout(60)
        word = heard(late)
        if isinstance(word, messages.TaskStarted):  # where the wrapper itself was kept from running until now
            word = heard(late)
        assert word.code == 3

    assert process.wait(60) == 3
    assert Path(wrapper.__file__).exists()
