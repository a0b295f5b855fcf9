"""What a look at a running run costs little to know: its status, and the ends of journal and metrics."""

from __future__ import annotations

import itertools
import math

import msgspec

from stepkeeper.core import events as on
from stepkeeper.core.state import Phase
from stepkeeper.seeing.reading import METRICS_NAME
from stepkeeper.store import journal, lines
from stepkeeper.store import status as status_file
from stepkeeper.store.journal import Record
from stepkeeper.store.rundir import RunDirectory
from stepkeeper.store.status import Status
from stepkeeper_trainer.formats.plain import open_plain

RECORDS_BACK_MAX = 1_500
TOLD_MAX = 40
LOSSES = 120


class Glance(msgspec.Struct, frozen=True, kw_only=True):
    """A run at one moment.  Instants are Unix seconds."""

    status: Status | None
    told: tuple[Record, ...] = ()  # the newest decisions with a reason, oldest first
    phase_since: float | None = None
    losses: tuple[float, ...] = ()  # of the newest steps, oldest first; finite ones
    loss_not_finite: bool = False  # that of the newest step
    committed_at: float | None = None  # the newest commit
    left: tuple[tuple[str, str], ...] = ()  # (node, why): used no more in this attempt


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
        if record.why and len(told) < TOLD_MAX and not _is_ordinary(record):
            told.append(record)
        if committed_at is None and isinstance(record.event, on.CheckpointCommitted):
            committed_at = record.event.at
        if same and isinstance(record.event, on.NodeFaulted) and record.event.leave:
            left.setdefault(record.event.node, record.event.name)
        if len(told) >= TOLD_MAX and phase_over and committed_at is not None:
            break
    values = _losses(run)
    return Glance(
        status=status,
        told=tuple(reversed(told)),
        phase_since=since,
        losses=tuple(value for value in values if math.isfinite(value)),
        loss_not_finite=bool(values) and not math.isfinite(values[-1]),
        committed_at=committed_at,
        left=tuple(left.items()),
    )


def _is_ordinary(record: Record) -> bool:
    """A periodic save that went well: so many of them that they would hide the rest."""
    event = record.event
    return isinstance(event, on.CheckpointCommitted) and not event.emergency and not event.drift and not record.effects


def changed_at(run: RunDirectory) -> tuple[tuple[int, int], ...]:
    """Return what changes when there is something new to see: sizes and times of the three files."""
    found = []
    for path in (run.status, run.journal, run.path / METRICS_NAME):
        try:
            status = path.stat()
        except OSError:
            continue  # not there yet
        found.append((status.st_size, status.st_mtime_ns))
    return tuple(found)


def _losses(run: RunDirectory) -> list[float]:
    try:
        file = open_plain(run.path / METRICS_NAME, within=run.path)
    except FileNotFoundError:
        return []
    found: list[float] = []
    with file:
        for line in itertools.islice(lines.backwards(file), 2 * LOSSES):
            cells = line.split(b",")
            try:
                value = float(cells[1])
            except (ValueError, IndexError):
                continue  # the header, torn, or a step without a loss
            found.append(value)
            if len(found) == LOSSES:
                break
    return found[::-1]


def is_over(seen: Glance) -> bool:
    """Tell whether nothing more will come by itself: it ended, and was not requeued."""
    status = seen.status
    return status is not None and status.phase == Phase.DONE and status.exit_code not in (None, 10, 12)
