"""What a look at a running run costs little to know: its status, and the ends of journal and metrics."""

from __future__ import annotations

import itertools
import math

import msgspec

from stepkeeper.core import events as on
from stepkeeper.core.exits import ExitCode
from stepkeeper.core.state import Phase
from stepkeeper.seeing import queue
from stepkeeper.seeing.progress import Row
from stepkeeper.seeing.queue import Queued, Waiting
from stepkeeper.seeing.reading import METRICS_NAME
from stepkeeper.seeing.rows import AT_MAX
from stepkeeper.store import journal, lines, submission
from stepkeeper.store import status as status_file
from stepkeeper.store.journal import Record
from stepkeeper.store.rundir import RunDirectory
from stepkeeper.store.status import Status
from stepkeeper_trainer.formats.plain import open_plain

RECORDS_BACK_MAX = 1_500
TOLD_MAX = 40
ROWS = 120


class Glance(msgspec.Struct, frozen=True, kw_only=True):
    """A run at one moment.  Instants are Unix seconds."""

    status: Status | None
    told: tuple[Record, ...] = ()  # the newest decisions with a reason, oldest first
    phase_since: float | None = None
    rows: tuple[Row, ...] = ()  # the newest completed steps, oldest first
    committed_at: float | None = None  # the newest commit
    left: tuple[tuple[str, str], ...] = ()  # (node, why): used no more in this attempt
    waiting: Waiting | None = None  # the job that has not begun to work on it
    queued: Queued | None = None  # what Slurm says of that job, or of one that fell silent; None: it was not asked

    @property
    def losses(self) -> tuple[float, ...]:
        """Those of the newest steps that are finite, oldest first."""
        return tuple(row.loss for row in self.rows if row.loss is not None and math.isfinite(row.loss))

    @property
    def loss_not_finite(self) -> bool:
        """Whether the newest known loss is NaN or infinite."""
        told = [row.loss for row in self.rows if row.loss is not None]
        if self.status is not None and self.status.loss_not_finite:
            return True
        return bool(told) and not math.isfinite(told[-1])


def glance(run: RunDirectory) -> Glance:
    """Look at a run.  What is not there, or torn, tells nothing.

    Raises:
        OSError: a file is there and cannot be read.
    """
    try:
        status = status_file.read(run.status)
    except msgspec.MsgspecError:
        status = None
    told: list[Record] = []
    since: float | None = None
    phase_over = False
    committed_at: float | None = None
    left: dict[str, str] = {}
    newest: Record | None = None
    records = (line.record for line in journal.read_lines(run.journal, newest_first=True) if line.record is not None)
    for record in itertools.islice(records, RECORDS_BACK_MAX):
        newest = newest or record
        same = record.attempt == newest.attempt
        if same and not phase_over:
            phase_over = record.phase is not newest.phase
            since = since if phase_over else record.event.at
        if record.reasons and len(told) < TOLD_MAX and not _is_ordinary(record):
            told.append(record)
        if committed_at is None and isinstance(record.event, on.CheckpointCommitted):
            committed_at = record.event.at
        if same and isinstance(record.event, on.NodeFaulted) and record.event.leave:
            left.setdefault(record.event.node, record.event.name)
        if len(told) >= TOLD_MAX and phase_over and committed_at is not None:
            break
    return Glance(
        status=status,
        told=tuple(reversed(told)),
        phase_since=since,
        rows=rows(run),
        committed_at=committed_at,
        left=tuple(left.items()),
        waiting=queue.waiting(run, status),
    )


def _is_ordinary(record: Record) -> bool:
    """A periodic save that went well: so many of them that they would hide the rest."""
    event = record.event
    return isinstance(event, on.CheckpointCommitted) and not event.emergency and not event.drift and not record.effects


def changed_at(run: RunDirectory) -> tuple[tuple[int, int], ...]:
    """Return what changes when there is something new to see: sizes and times of the files."""
    found = []
    for path in (run.status, run.journal, run.path / METRICS_NAME, run.path / submission.NAME):
        try:
            status = path.stat()
        except OSError:
            continue  # not there yet
        found.append((status.st_size, status.st_mtime_ns))
    return tuple(found)


def rows(run: RunDirectory) -> tuple[Row, ...]:
    """Return the newest completed steps, oldest first.

    Raises:
        OSError: they cannot be read.
    """
    try:
        file = open_plain(run.path / METRICS_NAME, within=run.path)
    except FileNotFoundError:
        return ()
    found: list[Row] = []
    with file:
        for line in itertools.islice(lines.backwards(file), 2 * ROWS):
            cells = line.split(b",")
            try:
                loss = float(cells[1]) if cells[1] else None
                at = float(cells[5])
                found.append(Row(int(cells[0]), loss, at if 0 < at < AT_MAX else 0.0, (int(cells[6]), int(cells[7]))))
            except (ValueError, IndexError):
                continue  # the header, or torn
            if len(found) == ROWS:
                break
    return tuple(reversed(found))


def is_over(seen: Glance) -> bool:
    """Tell whether nothing more will come by itself: it ended, and no job of it waits that Slurm knows of."""
    if seen.waiting is not None:
        return seen.queued is not None and queue.is_over(seen.queued)
    status = seen.status
    goes_on = (None, ExitCode.REQUEUED, ExitCode.SUPERSEDED)
    return status is not None and status.phase == Phase.DONE and status.exit_code not in goes_on


def asks_slurm(seen: Glance, now: float) -> str | None:
    """Return the job that only Slurm can tell of: the one that is waited for, or whose supervisor fell silent."""
    if seen.waiting is not None:
        return seen.waiting.job
    if seen.status is not None and status_file.is_silent(seen.status, now):
        return queue.name(seen.status)
    return None
