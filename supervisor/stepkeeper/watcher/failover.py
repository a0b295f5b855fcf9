"""What a watcher does about a supervisor that may be gone: look for signs of it, ask Slurm, and requeue the job.

Shared storage and Slurm's commands may hang, so all of that is done on a thread, one probe at a time.  The loop of the
watcher receives messages of the supervisor meanwhile: one of them cancels the probe, which then changes nothing.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
from enum import Enum, auto
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from stepkeeper.core.liveness import Life, Peer
from stepkeeper.watcher.messages import Assignment

if TYPE_CHECKING:
    from stepkeeper.watcher.rescue import Result

STATUS_NAME, JOURNAL_NAME = "status.json", "journal.jsonl"  # a supervisor that runs writes the first every 5 s


class Found(Enum):
    """What one probe reports to the watcher's loop before it ends."""

    SIGN = auto()  # the supervisor has written to the run directory since the probe before
    LOST = auto()  # the supervisor is lost, and the job is about to end: the ranks are to save now
    UNKNOWN = auto()  # Slurm sent SIGTERM, and neither it nor the supervisor answers: a save can do no harm


class Report(msgspec.Struct, frozen=True):
    """Something that a probe found, for the watcher's loop."""

    probe: int
    what: Found | Result


class Failover:
    """Probes on a thread.  `fileno` is readable when `take` has something."""

    def __init__(self, assignment: Assignment, node: str) -> None:
        """Begin with no suspicion."""
        self._assignment = assignment
        self._node = node
        self._reports: queue.SimpleQueue[Report] = queue.SimpleQueue()
        self._reader, self._writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._probe = 0  # the newest; what an older one finds counts no more
        self._runs = threading.Lock()
        self._signs: tuple[object, ...] | None = None  # as the probe before saw them; None: there was none
        self._written = Peer(0.0)

    def fileno(self) -> int:
        """For select."""
        return self._reader

    def probe(self, *, gone: bool, signaled: bool, again: bool) -> bool:
        """Begin a probe; false where one is still under way.

        Args:
            gone: the supervisor counts as gone: then a job that runs is requeued, too.
            signaled: Slurm sent SIGTERM: the job may be ending right now.
            again: an earlier probe came to nothing: a controller that is overloaded is given more time to answer.
        """
        if not self._runs.acquire(blocking=False):
            return False
        self._probe += 1
        work = (self._probe, gone, signaled, again)
        threading.Thread(target=self._work, args=work, name="failover", daemon=True).start()
        return True

    def cancel(self) -> None:
        """The supervisor sent a message, or new doubts begin: a probe that is under way changes nothing any more.

        Signs count only from now on: what was written before a signal says nothing about who lives after it.
        """
        self._probe += 1
        self._signs = None

    def take(self) -> list[Found | Result]:
        """Return what the newest probe has found."""
        with contextlib.suppress(BlockingIOError):
            os.read(self._reader, 4096)
        found = []
        while not self._reports.empty():
            report = self._reports.get()
            if report.probe == self._probe:
                found.append(report.what)
        return found

    # --- the thread -------------------------------------------------------------------------------

    def _work(self, probe: int, gone: bool, signaled: bool, again: bool) -> None:  # noqa: FBT001 - of `probe`
        # imported now: a watcher whose supervisor lives needs none of it, and its memory stays small
        from stepkeeper.watcher.rescue import Result, rescue  # noqa: PLC0415

        def cancelled() -> bool:
            return self._probe != probe

        def put(what: Found | Result) -> None:
            self._reports.put(Report(probe, what))
            with contextlib.suppress(BlockingIOError):  # full: the loop wakes anyway
                os.write(self._writer, b"\0")

        try:
            writes = self._writes(probe)
            gone = gone and writes is not None and writes is not Life.ALIVE
            result = rescue(
                self._assignment, self._node, gone=gone, asks=gone or (signaled and writes is not Life.ALIVE),
                again=again, lost=lambda: put(Found.LOST), cancelled=cancelled,
            )  # fmt: skip
            if result.unanswered:
                put(Found.UNKNOWN)
            put(result)
            if writes is Life.ALIVE:
                put(Found.SIGN)
        except Exception as error:  # noqa: BLE001 - reported, and tried again: nobody else can save the run
            put(Result(done=False, why=f"the probe itself failed: {error!r}"))
        finally:
            self._runs.release()

    def _writes(self, probe: int) -> Life | None:
        """Tell by its files whether the supervisor lives, by the rule for its messages; None: not known yet.

        What counts is that they change, not the instants in them: clocks of two nodes need not agree.
        """
        now, found = time.monotonic(), signs(Path(self._assignment.run_directory))
        if self._probe != probe:  # cancelled while the storage hung
            return None
        before, self._signs = self._signs, found
        if before is None:
            self._written = Peer(now)
            return None
        if before != found:
            self._written = Peer(now)
            return Life.ALIVE
        # unchanged since a moment ago says nothing yet
        return None if self._written.life(now) is Life.ALIVE else self._written.life(now)


def signs(run_directory: Path) -> tuple[object, ...]:
    """Return what changes in a run directory while its supervisor runs, however it is compared."""
    return tuple(_state(run_directory / name) for name in (STATUS_NAME, JOURNAL_NAME))


def _state(path: Path) -> tuple[int, ...] | None:
    try:
        with path.open("rb") as file:  # opened: shared storage looks at the server then
            status = os.fstat(file.fileno())
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns
