"""Processes of several users, and the agent that they talk to: all of them real."""

import contextlib
import json
import os
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from stepkeeper.node_agent.protocol import Seen, encode

REPOSITORY = Path(__file__).resolve().parents[3]
GAMES, NEWS, NOBODY = 5, 9, 65534
WAIT_S = 90.0
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: processes of several users are made")


class Person:
    """A process of a user's that does one thing."""

    def __init__(self, uid: int, work: Callable[..., Any], *arguments: Any) -> None:
        reader, writer = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            status = 1
            try:
                os.close(reader)
                if uid != 0:
                    os.setgroups([])
                    os.setresgid(uid, uid, uid)
                    os.setresuid(uid, uid, uid)
                os.write(writer, json.dumps(work(*arguments)).encode())
                status = 0
            except BaseException as error:  # noqa: BLE001 - told to the test, which fails with it
                os.write(writer, json.dumps({"error": repr(error)}).encode())
            finally:
                os._exit(status)
        os.close(writer)
        self._reader = reader
        self._over = False

    def result(self, within_s: float = WAIT_S) -> Any:
        """Return what it found out."""
        ready, _, _ = select.select([self._reader], [], [], within_s)
        if not ready:
            self.end()
            raise AssertionError(f"no word of process {self.pid} in {within_s} s")
        text = b""
        while part := os.read(self._reader, 65536):
            text += part
        self.end()
        found = json.loads(text)
        assert not (isinstance(found, dict) and "error" in found), found
        return found

    def end(self) -> None:
        """Kill it, if it lives, and wait; harmless when done twice: its number may be another's by then."""
        if self._over:
            return
        self._over = True
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        os.close(self._reader)


def by(uid: int, work: Callable[..., Any], *arguments: Any, within_s: float = WAIT_S) -> Any:
    """Have a user do something, and return the outcome."""
    return Person(uid, work, *arguments).result(within_s)


class AgentProcess:
    """The program of `agent.py`, its words and its size."""

    def __init__(self, directory: Path, **limits: Any) -> None:
        self.path = str(directory / "run" / "agent.sock")
        self.output = directory / "said"
        self._number = 0
        with self.output.open("wb") as out:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.node_agent.socket.agent", self.path, json.dumps(limits)],
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=subprocess.STDOUT,
                cwd=REPOSITORY,
                text=True,
            )
        self.pid = self._process.pid
        until(lambda: self.said("event", "socket_listening"), "the agent's socket", self.words)

    def tell(self, **command: Any) -> None:
        """Give a command, and wait until it was obeyed."""
        self._number += 1
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({**command, "number": self._number}) + "\n")
        self._process.stdin.flush()
        until(lambda: self.said("done", self._number), f"the command {command}", self.words)
        assert self.said("done", self._number)[0]["alive"], self.words()

    def job(self, job_id: int, uid: int, **more: Any) -> None:
        """Let Slurm know a job."""
        facts = {"job_id": job_id, "uid": uid, "state": "RUNNING", "restarts": 0, "nodes": ["n1"]}
        self.tell(jobs=[{**facts, **more}])

    def words(self) -> list[dict[str, Any]]:
        """Return all that it said."""
        found = []
        for line in self.output.read_text().splitlines():
            try:
                found.append(json.loads(line))
            except ValueError:
                found.append({"unexpected": line})
        return found

    def said(self, key: str, value: Any = None) -> list[dict[str, Any]]:
        """Return the words with this key, and this value."""
        return [word for word in self.words() if key in word and value in (None, word[key])]

    def rss_kib(self) -> int:
        """Return its resident memory."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        return int(next(line for line in status.splitlines() if line.startswith("VmRSS:")).split()[1])

    def descriptors(self) -> int:
        """Return how many descriptors it has open."""
        return len(os.listdir(f"/proc/{self.pid}/fd"))

    def cpu_s(self) -> float:
        """Return the processor time that it has used."""
        parts = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(parts[11]) + int(parts[12])) / os.sysconf("SC_CLK_TCK")

    def close(self) -> None:
        """Have it end in order: a traceback or a late end is a failure."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            status = self._process.wait(WAIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(WAIT_S)
            raise
        assert status == 0, self.words()[-20:]
        assert not self.said("unexpected"), self.said("unexpected")
        assert not os.path.exists(self.path)


def until(
    condition: Callable[[], object], what: str, found: Callable[[], object] = lambda: "", within_s: float = WAIT_S
) -> None:
    """Wait until something holds."""
    limit = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < limit, f"waited {within_s} s for {what}; {found()}"
        time.sleep(0.02)


@contextlib.contextmanager
def public_directory() -> Iterator[Path]:
    """Make a directory that every user can pass through, as /run is."""
    directory = Path(tempfile.mkdtemp(prefix="sk-", dir="/tmp"))
    directory.chmod(0o755)
    try:
        yield directory
    finally:
        shutil.rmtree(directory)


def raw(path: str, within_s: int = 5) -> socket.socket:
    """Connect without our client: attackers do not use it."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", within_s, 0))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", within_s, 0))
    sock.connect(path)
    return sock


def incident(name: str = "XID 79", **more: Any) -> dict[str, Any]:
    """Return an incident as the agent publishes it."""
    facts = {"incident": "i1", "at": 1.0, "action": "drain_reboot", "domain": "hardware", "name": name, **more}
    assert encode(Seen(**facts))
    return facts
