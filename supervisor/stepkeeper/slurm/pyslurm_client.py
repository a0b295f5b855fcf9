"""The Slurm client over pyslurm, which lives in a child process.

In ours it would hold the GIL while it waits for the controller, and end us where it finds no slurm.conf.

What pyslurm cannot do as it must be done is left to Slurm's commands: `cancel` (it judges by an errno that the call
before may have left), `keep` (it cannot change the nodes of a running job), `comment`, `hostnames`, `resubmit` (it
gives no batch script), and the tasks of an array.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from enum import StrEnum
from typing import Any

import msgspec

from stepkeeper.core.events import JobFacts
from stepkeeper.slurm import pyslurm_child
from stepkeeper.slurm.client import ClusterSettings, SlurmError
from stepkeeper.slurm.jobs import CALL_WITHIN_S, SlurmCommands, job_state

ENDS_WITHIN_S = 1.0  # after SIGKILL
WORDS_MAX = 300
_READ_BYTES = 65_536
_ORDERS = frozenset(("requeue", "exclude"))


class _Answer(msgspec.Struct, frozen=True, kw_only=True):
    result: Any = None
    error: str | None = None
    unreachable: bool = False
    no_such_job: bool = False


class _ChildDiedError(SlurmError):
    """The process ended instead of answering: whether an order was carried out is not known."""


class _Child:
    """The process and its pipes; one question at a time."""

    def __init__(self, python: str) -> None:
        """Start it.  Raises OSError."""
        self.process = subprocess.Popen(
            [python, "-I", os.path.abspath(pyslurm_child.__file__)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,  # a signal to our process group must not end a call half-way
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        self._in, self._out, self._err = self.process.stdin, self.process.stdout, self.process.stderr
        self.words = b""

    def ask(self, question: bytes, until: float) -> bytes | None:
        """Return the line of the answer, empty where the process ended, None where there is none in time."""
        try:
            self._in.write(question + b"\n")
        except BrokenPipeError:
            return self._last_words(until)
        line = b""
        open_streams = {self._out.fileno(), self._err.fileno()}
        while self._out.fileno() in open_streams:
            poll = select.poll()
            for descriptor in open_streams:
                poll.register(descriptor, select.POLLIN)
            ready = poll.poll(max(0.0, until - time.monotonic()) * 1000)
            if not ready:
                return None
            for descriptor, _ in ready:
                data = os.read(descriptor, _READ_BYTES)
                if not data:
                    open_streams.discard(descriptor)
                elif descriptor == self._err.fileno():
                    self.words = (self.words + data)[-WORDS_MAX:]
                else:
                    line += data
            if line.endswith(b"\n"):
                return line
        return self._last_words(until)

    def _last_words(self, until: float) -> bytes:
        """Read what it said on standard error before it ended."""
        while select.select([self._err], [], [], max(0.0, until - time.monotonic()))[0]:
            data = os.read(self._err.fileno(), _READ_BYTES)
            if not data:
                break
            self.words = (self.words + data)[-WORDS_MAX:]
        return b""

    def end(self) -> int | None:
        """Kill it, give the pipes back, and return its exit code; None where not even SIGKILL ends it."""
        try:
            code = self.process.wait(0.0 if self.process.poll() is not None else 0.05)
        except subprocess.TimeoutExpired:
            self.process.kill()
            try:
                code = self.process.wait(ENDS_WITHIN_S)
            except subprocess.TimeoutExpired:
                return None
        finally:
            for stream in (self._in, self._out, self._err):
                stream.close()
        return code


class PyslurmClient(SlurmCommands):
    """Asks pyslurm in a child process, which is started at the first call, and again after it died."""

    def __init__(self, *, python: str = sys.executable, call_within_s: float = CALL_WITHIN_S) -> None:
        """Describe it; nothing starts yet.

        Args:
            python: An interpreter that finds pyslurm (`python -I`): ours, or another one.
            call_within_s: The time limit of each call.
        """
        super().__init__(call_within_s=call_within_s)
        self._python = python
        self._lock = threading.Lock()
        self._child: _Child | None = None

    @property
    def pid(self) -> int | None:
        """The child process; None where none was started, or the last one was ended."""
        return self._child.process.pid if self._child is not None else None

    def job(self, job: str) -> JobFacts:
        """See `SlurmCommands`."""
        if not job.isdigit():
            return super().job(job)
        found = self._ask_child("job", int(job))
        if found.pop("id") != int(job):  # the leader of an array stands for all its tasks
            return super().job(job)
        return JobFacts(state=job_state(found["slurm_state"]), **found)

    def settings(self) -> ClusterSettings:
        """See `SlurmCommands`."""
        return ClusterSettings(**self._ask_child("settings"))

    def requeue(self, job: str) -> None:
        """See `SlurmCommands`."""
        if job.isdigit():
            self._ask_child("requeue", int(job))
        else:
            super().requeue(job)

    def exclude(self, job: str, nodes: Sequence[str], *, within_s: float | None = None) -> None:
        """See `SlurmCommands`."""
        if job.isdigit() and nodes and within_s is None:  # pyslurm takes an empty list for no change
            self._ask_child("exclude", int(job), list(nodes))
        else:
            super().exclude(job, nodes, within_s=within_s)

    def close(self) -> None:
        """End the child process."""
        with self._lock:
            if self._child is not None:
                self._child.end()
                self._child = None

    def _ask_child(self, what: str, *arguments: object) -> Any:
        """Ask the child, and return its answer.  A question whose child died is asked again, once; an order never."""
        name = f"pyslurm {what} {' '.join(map(str, arguments))}".strip()
        question = msgspec.json.encode([what, *arguments])
        with self._patience() as within_s:
            until = time.monotonic() + within_s
            if not self._lock.acquire(timeout=within_s):
                raise SlurmError(f"{name}: another call took {within_s:g} s", unreachable=True)
            try:
                return self._ask(name, question, within_s, until)
            except _ChildDiedError:
                if what in _ORDERS:
                    raise
                return self._ask(name, question, within_s, until)
            finally:
                self._lock.release()

    def _ask(self, name: str, question: bytes, within_s: float, until: float) -> Any:
        if self._child is not None and self._child.process.poll() is not None:
            self._child.end()
            self._child = None
        try:
            self._child = self._child or _Child(self._python)
        except OSError as error:
            raise SlurmError(f"{name}: {self._python}: {error.strerror}") from error
        line = self._child.ask(question, until)
        if not line:
            child, self._child = self._child, None
            code = child.end()
            if line is None:
                raise SlurmError(f"{name}: no answer in {within_s:g} s", unreachable=True)
            said = " ".join(child.words.decode(errors="replace").split())
            raise _ChildDiedError(f"{name}: its process ended with {code}: {said}", unreachable=True)
        answer = msgspec.json.decode(line, type=_Answer)
        if answer.error is None:
            return answer.result
        said = f"{name}: {answer.error}"
        raise SlurmError(said, unreachable=answer.unreachable, no_such_job=answer.no_such_job)


# Which Slurm client: Slurm's commands, which fit every Slurm, or pyslurm where it was asked for and fits.


class ClientKind(StrEnum):
    """The clients that there are."""

    COMMANDS = "commands"
    PYSLURM = "pyslurm"


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """The client that was chosen, and why: for the caller's log."""

    client: SlurmCommands
    kind: ClientKind
    why: str


def choose(wanted: ClientKind = ClientKind.COMMANDS, *, job: str | None = None, python: str = sys.executable) -> Choice:
    """Return a client that works here: a client that does not fit is no reason to stop a run.

    Whether pyslurm fits is asked of it, not read off versions: it must report the same of this cluster, and of `job`,
    as Slurm's commands do.

    Args:
        wanted: What the settings ask for.
        job: Our own job, if we are in one.
        python: The interpreter that has pyslurm.

    Raises:
        SlurmError: Slurm's commands do not answer either.
    """
    commands = SlurmCommands()
    if wanted is ClientKind.COMMANDS:
        return Choice(client=commands, kind=ClientKind.COMMANDS, why="Slurm's commands, as set")
    client = PyslurmClient(python=python)
    if misfit := _misfit(client, commands, job):
        client.close()
        return Choice(
            client=commands, kind=ClientKind.COMMANDS, why=f"Slurm's commands, for pyslurm does not fit: {misfit}"
        )
    return Choice(client=client, kind=ClientKind.PYSLURM, why="pyslurm, as set: it reports what Slurm's commands do")


def _misfit(client: SlurmCommands, commands: SlurmCommands, job: str | None) -> str:
    """Return what speaks against a client; empty where nothing does."""
    known = commands.settings()
    facts = commands.job(job) if job is not None else None
    try:
        found = client.settings()
        if found != known:
            return f"it reports {found}, Slurm's commands {known}"
        if job is not None and facts is not None and (of_job := client.job(job)) != facts:
            return f"it reports {of_job} of job {job}, Slurm's commands {facts}"
    except SlurmError as error:
        return str(error)
    return ""
