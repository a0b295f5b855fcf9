"""`journal.jsonl` of the run directory records what happened to a run, and what the supervisor decided and why.

Each line is one JSON object: an event, the reasons, and the effects, which are what the supervisor then did.
It holds no environment, no argument list and no secret.  This is version 1 of the schema.  Readers skip
lines that they cannot parse.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
import xxhash

from stepkeeper.core import effects as do
from stepkeeper.core import events as on
from stepkeeper.core.baseline import Baseline
from stepkeeper.core.causes import SkippedData, Tried
from stepkeeper.core.effects import Effect
from stepkeeper.core.events import Event, Exclusion
from stepkeeper.core.reasons import Why
from stepkeeper.core.state import Phase
from stepkeeper.reason_text import text
from stepkeeper.run_store import lines, old_journals
from stepkeeper_trainer.formats.alone import why_not_alone
from stepkeeper_trainer.formats.durable import append_line, write_all
from stepkeeper_trainer.formats.plain import open_plain

VERSION = 1
RECORDS_WAITING_MAX = 100_000
BATCH_RECORDS_MAX = 256  # written with one fsync
RETRY_AFTER_S = 5.0
LATE_RECORDS_MAX = 200  # that may stand behind the newest attempt's last one
_WORDS: dict[type, str] = {do.Exit: "reason", do.NotifyUser: "reason", do.AnswerRequest: "said"}  # else `why`
NODES_EVERY = 64  # records: a reader from the end finds the nodes without reading far


class Record(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line of the journal.  `phase`, `failures` and the other counts are those after the event."""

    v: int  # version of the schema
    job_id: int
    restart_count: int  # Slurm's restart count; with the job id it identifies the attempt
    attempt: int  # number of the attempt, over all jobs of the run
    launch: int  # number of the launch in the attempt
    phase: Phase
    event: Event  # what happened
    why: str = ""  # the reasons in words; empty if the event changed nothing
    reasons: Why = ()  # the reasons with their facts, for programs; release 0.1 wrote `why` only
    effects: tuple[Effect, ...] = ()  # what the supervisor then did
    failures: int = 0  # launches that failed since the last verified progress
    node_losses: int = 0  # nodes lost since the last verified progress
    best_step: int | None = None  # the highest verified step
    nodes: tuple[str, ...] | None = None  # usable nodes of the allocation; None: the same as in the record before
    excluded: tuple[Exclusion, ...] = ()  # nodes on which the job must not run
    tried: tuple[Tried, ...] = ()  # how often launches failed, and in which ways
    skipped_data: tuple[SkippedData, ...] = ()  # data that the training leaves out, because a loss went wrong on it
    baseline: Baseline = Baseline()  # how long starts and steps of the run usually take
    number: int = 0  # number of the record in the attempt, from 1; 0: written by release 0.1
    sample: bool = False  # true: one of many similar events that changed nothing; most of them are not recorded
    missed: dict[str, Any] = {}  # changes of the state by events that were not recorded
    note: Literal["", "spooled"] = ""  # `spooled`: copied from the node's disk, since shared storage was late


_decoder: msgspec.json.Decoder[Record] = msgspec.json.Decoder(Record)


class Line(NamedTuple):
    """One line of a journal."""

    record: Record | None  # None where the line is torn, or of a newer version
    data: bytes


def epoch_of(record: Record) -> tuple[int, int]:
    """Return job id and restart count: they distinguish the records of one attempt from those of others."""
    return record.job_id, record.restart_count


def read(path: Path) -> Iterator[Record]:
    """Yield the records, oldest first.  A missing file has none; torn lines are skipped.

    Raises:
        OSError: the file is there and cannot be read.
    """
    return (line.record for line in read_lines(path) if line.record is not None)


def read_lines(path: Path, *, newest_first: bool = False) -> Iterator[Line]:
    """Yield every line, those that are no records too.  A missing file has none.

    Raises:
        OSError: the file is there and cannot be read.
    """
    try:
        file = open_plain(path, within=path.parent)
    except FileNotFoundError:
        return
    with file:
        for data in lines.backwards(file) if newest_first else lines.forwards(file):
            if data:  # a writer that closes a torn line may leave an empty one
                yield Line(decode(data), data)


def decode(data: bytes) -> Record | None:
    """Return the record of a line; None where the line is torn, empty, or of a newer version."""
    try:
        data = old_journals.translate(data)
        record = _decoder.decode(data)
        if record.reasons or not (record.why or record.effects or record.excluded or record.missed):
            return record
        return msgspec.convert(old_journals.record(msgspec.json.decode(data)), Record)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):  # torn, newer, or written to hurt
        return None


class JournalWriter:
    """Appends records on a thread of its own: shared storage that hangs must not hang the supervisor.

    What could not be written is tried again, in order, until the storage takes it.  Where it took a part, the journal
    may hold that part twice.  A record names the nodes, thousands perhaps, only where they change and in every
    `NODES_EVERY`th record, else names would be nearly all that the journal holds.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._changed = threading.Condition()
        self._pending: deque[Record] = deque(maxlen=RECORDS_WAITING_MAX)  # not yet durable, oldest first
        self._dropped = 0  # records that the limit of `_pending` pushed out, ever
        self._tries = 0  # ended ones, ever
        self._spooled: Record | None = None  # the newest that is in the spool
        self._nodes: tuple[str, ...] | None = None  # as they were written last
        self._without_nodes = 0  # records since then
        self.failed = ""  # why the newest write failed; empty when it did not
        self._thread = threading.Thread(target=self._write, name="journal", daemon=True)
        self._thread.start()

    def append(self, record: Record) -> None:
        """Hand a record over; returns at once."""
        with self._changed:
            self._dropped += len(self._pending) == RECORDS_WAITING_MAX
            self._pending.append(self._shortened(record))
            self._changed.notify_all()

    def _shortened(self, record: Record) -> Record:
        """Leave out the nodes where they stand a few records before."""
        if record.nodes == self._nodes and self._without_nodes < NODES_EVERY - 1:
            self._without_nodes += 1
            return msgspec.structs.replace(record, nodes=None)
        self._nodes, self._without_nodes = record.nodes, 0
        return record

    def flush(self, within_s: float) -> bool:
        """Wait until all that was handed over is durable; False if that takes longer, or fails.

        What is late is written to a spool on the node's own disk: a person finds it there while the
        shared storage is away.
        """
        with self._changed:
            tried = self._tries
            self._changed.notify_all()  # a writer that waits to try again tries now
            self._changed.wait_for(lambda: not self._pending or (self.failed and self._tries > tried), timeout=within_s)
            late = list(self._pending)
        if late:
            self._spool(late)
        return not late

    def _write(self) -> None:
        while True:
            with self._changed:
                if self.failed:
                    self._changed.wait(RETRY_AFTER_S)  # or until something new comes
                self._changed.wait_for(lambda: self._pending)
                batch = list(itertools.islice(self._pending, BATCH_RECORDS_MAX))
                dropped_before = self._dropped
            try:
                _append(self._path, batch, mode=_mode_beside(self._path))
                failed = ""
            except OSError as error:
                failed = f"{self._path}: {error.strerror}"
            with self._changed:
                self.failed = failed
                if not failed:
                    for _ in range(len(batch) - (self._dropped - dropped_before)):
                        self._pending.popleft()
                self._tries += 1
                self._changed.notify_all()

    def _spool(self, late: list[Record]) -> None:
        """Add to the spool what is not in it yet."""
        places = [index for index, record in enumerate(late) if record is self._spooled]
        new = late[places[0] + 1 :] if places else late
        if not new:
            return
        with contextlib.suppress(OSError):  # the node's disk fails as well: the log on stdout is left
            path = spool_path(self._path)
            _append(path, [msgspec.structs.replace(record, note="spooled") for record in new], mode=0o600)
            self._spooled = new[-1]


def _append(path: Path, records: Sequence[Record], *, mode: int) -> None:
    """Append records and fsync once.  A torn last line of a crashed writer is closed first.

    Raises:
        OSError: the lines may be there in part.
    """
    *before, last = [lines.encode(_with_words(record)) for record in records]
    if before:
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        descriptor = os.open(path, flags, mode)
        try:
            size = os.fstat(descriptor).st_size
            torn = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
            write_all(descriptor, (b"\n" if torn else b"") + b"\n".join(before) + b"\n")
        finally:
            os.close(descriptor)
    append_line(path, last, mode=mode)  # its fsync holds for the whole file


def _with_words(record: Record) -> Record | dict[str, Any]:
    """Return a record with the words of all its reasons: for people, and for programs that know no reasons."""
    event = record.event
    excluded = event.excluded if isinstance(event, on.AttemptStarted) else ()
    if not (record.effects or record.excluded or excluded):
        return record
    plain: dict[str, Any] = msgspec.to_builtins(record)
    for effect, said in zip(record.effects, plain.get("effects", ()), strict=True):
        if (reasons := getattr(effect, "reasons", None)) is not None:
            said[_WORDS.get(type(effect), "why")] = text(reasons)
        if isinstance(effect, do.JudgeLaunch) and effect.found is not None:
            said["found"]["text"] = text(effect.found.reasons)
    for exclusion, said in zip(record.excluded, plain.get("excluded", ()), strict=True):
        said["why"] = text(exclusion.reasons)
    for exclusion, said in zip(excluded, plain["event"].get("excluded", ()), strict=True):
        said["why"] = text(exclusion.reasons)
    return plain


def _mode_beside(path: Path) -> int:
    """Let the group read what stands in a directory that the group can read.  Raises OSError."""
    return 0o600 | (path.parent.stat().st_mode & 0o040)


def spool_path(journal: Path) -> Path:
    """Return where records go when the shared storage does not take them: a directory of ours alone.

    Raises:
        OSError: somebody else made a directory of that name.
    """
    directory = Path(tempfile.gettempdir()) / f"stepkeeper-{os.getuid()}"
    directory.mkdir(mode=0o700, exist_ok=True)
    found = why_not_alone(directory)
    if found is not None:
        raise PermissionError(errno.EPERM, found.text, str(directory))
    return directory / f"{xxhash.xxh3_64_hexdigest(str(journal).encode())}.journal.jsonl"


def merge_spool(journal: Path) -> int:
    """Take over what an earlier attempt on this node could not write; return how many records that were.

    Raises:
        OSError: the spool or the journal cannot be read or written; nothing is lost.
    """
    spool = spool_path(journal)
    newest = next((line.record for line in read_lines(journal, newest_first=True) if line.record), None)
    written_until = newest.event.at if newest is not None else 0.0  # later ones never reached the storage
    spooled = (line.record for line in read_lines(spool) if line.record is not None)
    records = [record for record in spooled if record.event.at > written_until]
    if records:
        _append(journal, records, mode=_mode_beside(journal))
    spool.unlink(missing_ok=True)
    return len(records)


class Carried(msgspec.Struct, frozen=True, kw_only=True):
    """What an attempt takes over from those before."""

    attempt: int
    failures: int = 0
    node_losses: int = 0
    best_step: int | None = None
    previous: str = ""  # how the attempt before ended, in words
    ended: bool = False  # it ended with a final record
    at: float = 0.0  # of its newest record, Unix seconds
    nodes: tuple[str, ...] = ()  # that the attempt before used at last
    excluded: tuple[Exclusion, ...] = ()
    tried: tuple[Tried, ...] = ()
    baseline: Baseline = Baseline()
    skipped_data: tuple[SkippedData, ...] = ()


def reconstruct(path: Path, *, now: float | None = None) -> Carried:
    """Tell from the journal how the attempt before ended: also when it had no time to say so.

    Reads the end of the journal only: a long run's next attempt starts as fast as its first.

    Raises:
        OSError: the journal is there and cannot be read.
    """
    last: Record | None = None
    nodes: tuple[str, ...] | None = None
    records = (line.record for line in read_lines(path, newest_first=True) if line.record is not None)
    for number, record in enumerate(itertools.islice(records, LATE_RECORDS_MAX + NODES_EVERY)):
        # a superseded supervisor may write its last record after the newer one's
        if last is None or (number < LATE_RECORDS_MAX and epoch_of(record) > epoch_of(last)):
            last, nodes = record, None
        if nodes is None and epoch_of(record) == epoch_of(last):
            nodes = record.nodes
    if last is None:
        return Carried(attempt=0)
    if last.phase is Phase.DONE:
        previous = f"attempt {last.attempt} ended: {last.why}"
    else:
        ago = max(0.0, (now if now is not None else time.time()) - last.event.at)
        previous = (
            f"attempt {last.attempt} ended without a final record while {last.phase.value}, "
            f"{ago:.0f} s ago: its supervisor was killed or its node lost"
        )
    return Carried(
        attempt=last.attempt + 1,
        failures=last.failures,
        node_losses=last.node_losses,
        best_step=last.best_step,
        previous=previous,
        ended=last.phase is Phase.DONE,
        at=last.event.at,
        nodes=nodes or (),
        excluded=last.excluded,
        tried=last.tried,
        baseline=last.baseline,
        skipped_data=last.skipped_data,
    )
