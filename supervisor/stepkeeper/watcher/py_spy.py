"""py-spy, where it is installed: stacks of Python, and those of native code below them.

It holds the process for as long as it looks: milliseconds for Python, longer where it reads the symbols of large
libraries.  One that stands anyway is not held, and shows Python's stack alone.  The kernel must allow the user to trace
his processes (`kernel.yama.ptrace_scope = 0`, which Ubuntu does not set); where it does not, py-spy says so and nothing
else is lost.
"""

from __future__ import annotations

import os
import queue
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeVar

from stepkeeper.watcher.kernel import state_of

NAME = "py-spy"
AT_ONCE = 4  # processes of one node that are looked at
NATIVE_AT_ONCE = 2  # one that reads the symbols of torch takes 0.3 GiB of the job's memory, and keeps a core busy
WAKE_WITHIN_S = 0.3

Found = TypeVar("Found")


class PySpyStacks(NamedTuple):
    """What py-spy said of a process, or why it said nothing."""

    text: str = ""
    problem: str = ""


def find() -> str | None:
    """Return the program: on the PATH, or installed beside us."""
    beside = os.path.join(os.path.dirname(sys.executable), NAME)
    return shutil.which(NAME) or (beside if os.access(beside, os.X_OK) else None)


def dump(program: str, pid: int, *, native: bool, within_s: float) -> PySpyStacks:
    """Have py-spy write a process's stacks; it is ended after `within_s` seconds, and the process goes on."""
    before = state_of(pid)
    if before in ("", "Z"):
        return PySpyStacks(problem="the process is gone")
    stands = before in ("D", "T", "t")  # it cannot be held: it never answers, or is held already
    if stands and native:
        return PySpyStacks(problem="the process is stopped, or stuck in the kernel")
    how = ("--native",) if native else ("--nonblocking",) if stands else ()
    try:
        done = subprocess.run(
            [program, "dump", "--full-filenames", *how, "--pid", str(pid)],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=max(0.1, within_s),
            stdin=subprocess.DEVNULL,
            check=False,
        )
    except subprocess.TimeoutExpired:
        if not stands:
            _go_on(pid)  # takes back a stop, too, that the process of a busy node has not come to yet
        _wake(pid, before, WAKE_WITHIN_S)
        return PySpyStacks(problem=f"{NAME} did not end in time")
    except OSError as error:
        return PySpyStacks(problem=f"{program}: {error.strerror}")
    _wake(pid, before)
    if done.returncode:
        said = done.stderr.partition("Stack backtrace")[0].split() or [f"it ended with {done.returncode}"]
        return PySpyStacks(problem=f"{NAME}: {' '.join(said)}")
    return PySpyStacks(text=done.stdout)


def _wake(pid: int, before: str, within_s: float = 0.0) -> None:
    """Undo what a py-spy that was ended in its work may leave behind: the stop signal by which some hold a process."""
    until = time.monotonic() + within_s
    while before != "T":
        if state_of(pid) == "T" and not _go_on(pid):
            return
        if time.monotonic() >= until:
            return
        time.sleep(0.05)


def _go_on(pid: int) -> bool:
    """Let a process go on; return whether it is still there."""
    try:
        os.kill(pid, signal.SIGCONT)
    except OSError:  # it has gone meanwhile
        return False
    return True


def of_each(
    pids: Mapping[int, int], look: Callable[[int, int], Found], until: float, at_once: int = AT_ONCE
) -> dict[int, Found]:
    """Look at ranks in their order, several at a time; those whose turn has not come `until` then are left out.

    Args:
        pids: of each rank.
        look: called with rank and pid; it has a time limit of its own.
        until: monotonic seconds.
        at_once: how many.
    """
    turns: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()
    for turn in pids.items():
        turns.put(turn)
    found: dict[int, Found] = {}

    def work() -> None:
        while time.monotonic() < until:
            try:
                rank, pid = turns.get_nowait()
            except queue.Empty:
                return
            found[rank] = look(rank, pid)

    threads = [threading.Thread(target=work, name="look", daemon=True) for _ in range(min(at_once, len(pids)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found
