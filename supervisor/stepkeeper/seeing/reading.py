"""A run directory -> its timeline.  All I/O of `seeing` is here."""

from __future__ import annotations

import time

import msgspec

from stepkeeper.seeing import checkpoints, history, rows, timeline
from stepkeeper.seeing.checkpoints import OnDisk
from stepkeeper.seeing.model import Incident, micro
from stepkeeper.seeing.timeline import Timeline
from stepkeeper.store import journal, rescues
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
    _tell_rescues(run, told)
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


def _tell_rescues(run: RunDirectory, told: history.Told) -> None:
    """Say of attempts that ended without a word who requeued them."""
    attempts = {(attempt.job_id, attempt.restart_count): attempt for attempt in told.attempts}
    for rescue in rescues.read(run.path):
        attempt = attempts.get((rescue.job_id, rescue.restart_count))
        if attempt is None or attempt.said_end:
            continue
        decided = f"requeued by the watcher on {rescue.node}"
        launch = attempt.launches[-1] if attempt.launches else None
        if launch is not None:
            launch.decided = launch.decided or decided
        told.incidents.found.append(
            Incident(
                at=micro(rescue.at),
                attempt=attempt.number,
                launch=launch.number if launch is not None else None,
                kind="supervisor lost",
                what="it was killed, or its node was lost",
                decided=decided,
                node=rescue.node,
            )
        )
    told.incidents.found.sort(key=lambda each: each.at)


def _updated_at(run: RunDirectory) -> int | None:
    try:
        status = status_file.read(run.status)
    except msgspec.MsgspecError:
        return None  # a status that is none tells nothing; the journal counts
    return micro(status_file.heard_at(status)) if status is not None else None
