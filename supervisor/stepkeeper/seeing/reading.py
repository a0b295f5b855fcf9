"""A run directory -> its timeline.  All I/O of `seeing` is here."""

from __future__ import annotations

import time

import msgspec

from stepkeeper.seeing import checkpoints, history, rows, timeline
from stepkeeper.seeing.checkpoints import OnDisk
from stepkeeper.seeing.model import micro
from stepkeeper.seeing.timeline import Timeline
from stepkeeper.store import journal
from stepkeeper.store import status as status_file
from stepkeeper.store.rundir import RunDirectory
from stepkeeper_trainer.formats import lineage as lineages
from stepkeeper_trainer.formats import steps

METRICS_NAME = "metrics.csv"


def see(run: RunDirectory, *, now: float | None = None) -> Timeline:
    """Read everything that a run has written.  What is missing tells nothing; what is torn is passed over.

    Args:
        run: the run directory.
        now: Unix seconds, to tell a silent run from a running one; the clock's by default.

    Raises:
        OSError: a file is there and cannot be read.
    """
    told = history.tell(journal.read(run.journal))
    disk = {
        entry.path.name: OnDisk(
            step=entry.step,
            save_id=entry.manifest.save_id if entry.manifest is not None else "",
            problem=entry.problem or "",
        )
        for entry in steps.list_steps(run.checkpoints)
    }
    found = checkpoints.checkpoints(told, lineages.read(run.checkpoints), disk)
    return timeline.build(
        told,
        rows.read(run.path / METRICS_NAME),
        found,
        updated_at=_updated_at(run),
        now=micro(time.time() if now is None else now),
    )


def _updated_at(run: RunDirectory) -> int | None:
    try:
        status = status_file.read(run.status)
    except msgspec.MsgspecError:
        return None  # a status that is none tells nothing; the journal counts
    return micro(status.updated_at) if status is not None else None
