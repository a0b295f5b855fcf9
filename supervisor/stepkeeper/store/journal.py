"""`journal.jsonl`: the only state that outlives an attempt.

One JSON object a line: an event, why it changed anything, and the effects that were ordered.  No
environment, no argument list, no secret.  Version 1; readers skip lines that they cannot parse.
"""

from __future__ import annotations

import contextlib
import os
import queue
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec

from stepkeeper.core.effects import Effect
from stepkeeper.core.events import Event
from stepkeeper.core.state import Phase
from stepkeeper_trainer.formats.durable import append_line

VERSION = 1
RECORDS_WAITING_MAX = 100_000


class Record(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line.  `phase`, `failures`, ... are those after the event: what a next attempt carries over."""

    v: int
    job_id: int
    restart_count: int
    attempt: int
    launch: int
    phase: Phase
    event: Event
    why: str = ""
    effects: tuple[Effect, ...] = ()
    failures: int = 0
    node_losses: int = 0
    best_step: int | None = None
    note: Literal["", "spooled"] = ""


_encoder = msgspec.json.Encoder()
_decoder: msgspec.json.Decoder[Record] = msgspec.json.Decoder(Record)


def read(path: Path) -> Iterator[Record]:
    """Yield the records, oldest first.  A missing file has none; torn lines are skipped.

    Raises:
        OSError: the file is there and cannot be read.
    """
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return
    with file:
        for line in file:
            with contextlib.suppress(msgspec.MsgspecError):  # torn by a crash, or of a newer version
                yield _decoder.decode(line)


class JournalWriter:
    """Appends records on a thread of its own: shared storage that hangs must not hang the supervisor."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._waiting: queue.SimpleQueue[tuple[Record | None, threading.Event]] = queue.SimpleQueue()
        self._pending: list[Record] = []  # not yet durable, oldest first
        self._lock = threading.Lock()
        self.failed = ""  # why the newest write failed; empty when it did not
        self._thread = threading.Thread(target=self._write, name="journal", daemon=True)
        self._thread.start()

    def append(self, record: Record) -> None:
        """Hand a record over; returns at once."""
        with self._lock:
            self._pending.append(record)
            del self._pending[:-RECORDS_WAITING_MAX]
        self._waiting.put((record, threading.Event()))

    def flush(self, within_s: float) -> bool:
        """Wait until all that was handed over is durable; False if that takes longer.

        What is late is written to a spool on the node's own disk: whoever mourns the shared storage
        finds it there.
        """
        done = threading.Event()
        self._waiting.put((None, done))
        if done.wait(within_s) and not self.failed:
            return True
        self._spool()
        return False

    def _write(self) -> None:
        while True:
            record, done = self._waiting.get()
            if record is not None:
                self._write_one(record)
            done.set()

    def _write_one(self, record: Record) -> None:
        line = _encoder.encode(record)
        try:
            append_line(self._path, line)
        except OSError as error:
            self.failed = f"{self._path}: {error.strerror}"
            return  # kept in _pending, so in the spool; the next record tries the storage again
        with self._lock:
            self.failed = ""
            with contextlib.suppress(ValueError):  # dropped by the limit meanwhile
                self._pending.remove(record)

    def _spool(self) -> None:
        with self._lock:
            late = list(self._pending)
        path = spool_path(self._path)
        with contextlib.suppress(OSError):  # the node's disk fails as well: the log on stdout is left
            for record in late:
                append_line(path, _encoder.encode(msgspec.structs.replace(record, note="spooled")))


def spool_path(journal: Path) -> Path:
    """Return where records go when the shared storage does not take them."""
    name = str(journal.parent).strip("/").replace("/", "_")[-150:]
    return Path(tempfile.gettempdir()) / f"stepkeeper-{os.getuid()}-{name}.journal.jsonl"


class Carried(msgspec.Struct, frozen=True, kw_only=True):
    """What an attempt takes over from those before."""

    attempt: int
    failures: int = 0
    node_losses: int = 0
    best_step: int | None = None
    previous: str = ""  # how the attempt before ended, in words


def reconstruct(path: Path, *, now: float | None = None) -> Carried:
    """Tell from the journal how the attempt before ended: also when it had no time to say so.

    Raises:
        OSError: the journal is there and cannot be read.
    """
    last: Record | None = None
    for record in read(path):
        last = record
    if last is None:
        return Carried(attempt=0)
    if last.phase is Phase.DONE:
        previous = f"attempt {last.attempt} ended: {last.why}"
    else:
        ago = (now if now is not None else time.time()) - last.event.at
        previous = (
            f"attempt {last.attempt} ended without a word while {last.phase.value}, "
            f"{ago:.0f} s ago: its supervisor was killed or its node lost"
        )
    return Carried(
        attempt=last.attempt + 1,
        failures=last.failures,
        node_losses=last.node_losses,
        best_step=last.best_step,
        previous=previous,
    )
