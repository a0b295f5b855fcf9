"""Where a child waits before each of its threads begins, so that strace can be attached to that thread alone."""

from __future__ import annotations

import itertools
import json
import os
import secrets
import select
import subprocess
import tempfile
import threading
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.trainer.crash.calls import CALLS

ATTACHED_WITHIN_S = 60.0


@dataclass(frozen=True)
class Point:
    """A system call at which something happens."""

    rank: int
    role: str  # of the thread, and the how many-th of that name it is
    call: str
    path: str  # by which strace knows it
    number: int  # of the calls of that name on that path in that thread, from 1
    about: str

    def __str__(self) -> str:
        return f"rank {self.rank}, {self.role}: {self.about} ({self.number})"


class Gate:
    """The child's end: says who is about to begin, and waits to be let through."""

    def __init__(self, said: int, heard: int) -> None:
        self._said, self._heard = said, heard
        self._one = threading.Lock()
        self._counts: Counter[str] = Counter()

    def install(self) -> None:
        """Have every thread of this process wait; they are numbered as they are started, not as they come to run."""
        start, run = threading.Thread.start, threading.Thread.run
        numbered: dict[threading.Thread, str] = {}
        gate = self

        def number_and_start(thread: threading.Thread) -> None:
            numbered[thread] = gate._numbered(_role(thread.name))
            start(thread)

        def wait_and_run(thread: threading.Thread) -> None:
            gate._wait(numbered.pop(thread))
            run(thread)

        threading.Thread.start = number_and_start  # type: ignore[method-assign]
        threading.Thread.run = wait_and_run  # type: ignore[method-assign]

    def wait(self, role: str) -> None:
        """Wait to be let through."""
        self._wait(self._numbered(role))

    def _numbered(self, role: str) -> str:
        with self._one:
            self._counts[role] += 1
            return f"{role} {self._counts[role]}"

    def _wait(self, name: str) -> None:
        with self._one:
            self.say(gate=name, thread=threading.get_native_id())
            assert os.read(self._heard, 1) == b"g", "nobody is there to let us through"

    def say(self, **words: Any) -> None:
        """Tell the other end something; one write, so that a kill leaves it whole or out."""
        os.write(self._said, json.dumps(words).encode() + b"\n")


def steady_names(series: int = 0) -> None:
    """Have this process choose the same names each time for what gets a random one; another series has others.

    Each source counts for itself: beside the thread that names a save, others write files of their own at any time.
    """

    def numbers() -> Iterator[int]:
        return itertools.count(series * 1_000_000 + 1)

    files, identities, nonces, hexadecimal = numbers(), numbers(), numbers(), numbers()
    tempfile._name_sequence = map("{:08d}".format, files)
    uuid.uuid4 = lambda: uuid.UUID(int=next(identities))
    os.urandom = lambda count: next(nonces).to_bytes(count, "big")
    secrets.token_hex = lambda count=32: f"{next(hexadecimal):0{2 * count}x}"


def _role(name: str) -> str:
    """Return the part of a thread's name that is the same in each process."""
    number, _, function = name.partition(" (")
    return function.rstrip(")") if function and number.startswith("Thread-") else name


class Strace:
    """strace, attached to one thread, or to all threads of a process and those to come."""

    def __init__(self, thread: int, log: Path, *options: str) -> None:
        self.log = log
        command = ["strace", "-y", "-s", "100000", "-o", str(log), *options, "-p", str(thread)]
        self._process = subprocess.Popen(command, stderr=subprocess.PIPE)
        assert self._process.stderr is not None
        limit_at = time.monotonic() + ATTACHED_WITHIN_S
        said = b""
        while b" attached" not in said:
            left_s = max(0.0, limit_at - time.monotonic())
            ready, _, _ = select.select([self._process.stderr], [], [], left_s)
            more = os.read(self._process.stderr.fileno(), 65536) if ready else b""
            assert more, f"strace is not attached: {said.decode()}"
            said += more

    def detach(self) -> None:
        """Let what it is attached to go on by itself."""
        self._process.terminate()
        self._process.communicate(timeout=ATTACHED_WITHIN_S)

    def end(self) -> None:
        """Wait for it: it ends with what it is attached to."""
        self._process.communicate(timeout=ATTACHED_WITHIN_S)


def watching(process: int, log: Path) -> Strace:
    """Log what all threads of a process do."""
    return Strace(process, log, "-f", "-e", f"trace={CALLS}")


def injecting(thread: int, log: Path, point: Point, what: str) -> Strace:
    """Have one call of a thread go wrong: `what` is as strace has it, such as `signal=SIGKILL`."""
    # without -f: threads that it starts would count for themselves, and one of them might get there first
    inject = f"inject={point.call}:{what}:when={point.number}"
    return Strace(thread, log, "-P", point.path, "-e", f"trace={point.call}", "-e", inject)
