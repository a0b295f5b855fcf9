"""A run directory -> its timeline.  All I/O of `seeing` is here."""

from __future__ import annotations

import itertools
import os
import time
from pathlib import Path

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
from stepkeeper_trainer.formats.cache import Cache

METRICS_NAME = "metrics.csv"
LINES_BACK_MAX = 1_500  # of the journal, for a quick look


def see(run: RunDirectory, *, now: float | None = None) -> Timeline:
    """Read everything that a run has written.  What is missing tells nothing; what is torn is passed over.

    Args:
        run: the run directory.
        now: Unix seconds, to tell a silent run from a running one; the clock's by default.

    Raises:
        OSError: a file is there and cannot be read.
    """
    told = history.read_history(journal.read(run.journal))
    _tell_rescues(run, told)
    found = checkpoints.checkpoints(told, lineages.read(run.checkpoints), on_disk(run.checkpoints))
    return timeline.build(
        told,
        rows.read(run.path / METRICS_NAME),
        found,
        updated_at=_updated_at(run),
        now=micro(time.time() if now is None else now),
    )


def on_disk(checkpoints_directory: Path) -> dict[str, OnDisk]:
    """Look at the step directories, by name: names and sizes of files, and what is known of their bytes.

    Raises:
        OSError: they cannot be listed.
    """
    cache = Cache(checkpoints_directory)
    return {entry.path.name: look(entry, cache)[0] for entry in steps.list_steps(checkpoints_directory)}


def look(entry: steps.StepDirectory, cache: Cache) -> tuple[OnDisk, tuple[str, ...]]:
    """Look at one step directory; return it with all that is wrong with it."""
    problems: tuple[str, ...]
    problems, verified = (entry.problem or "no manifest",), False
    if entry.manifest is not None:
        problems, verified = steps.look_again(entry.path, cache)
    found = OnDisk(
        step=entry.step,
        save_id=entry.manifest.save_id if entry.manifest is not None else "",
        problem=problems[0] if problems else "",
        verified=verified,
        changed_at=_changed_at(entry.path),
    )
    return found, problems


def condition_of(directory: Path, run: RunDirectory) -> str:
    """Return one of the three words for a step directory of a run, by a look at it and the end of the journal.

    One that is not there any more is `gone`.

    Raises:
        OSError: the journal is there and cannot be read.
    """
    if not directory.is_dir():
        return "gone"
    newest = journal.read_lines(run.journal, newest_first=True)
    records = [line.record for line in itertools.islice(newest, LINES_BACK_MAX) if line.record is not None]
    there, _ = look(steps.open_step(directory), Cache(directory.parent))
    problem, verified = checkpoints.judged(directory.name, history.read_history(reversed(records)), there)
    return checkpoints.condition(problem, verified=verified)


def _changed_at(directory: Path) -> float:
    """Return when a file of a step directory was written last; not its ctime, which a link to it changes too."""
    try:
        with os.scandir(directory) as entries:
            return max((entry.stat(follow_symlinks=False).st_mtime for entry in entries), default=0.0)
    except OSError:
        return 0.0  # what is wrong there is told as its problem


def _tell_rescues(run: RunDirectory, told: history.History) -> None:
    """Say of attempts that ended without a word who requeued them."""
    attempts = {(attempt.job_id, attempt.restart_count): attempt for attempt in told.attempts}
    for rescue in rescues.read(run.path):
        attempt = attempts.get((rescue.job_id, rescue.restart_count))
        if attempt is None or attempt.said_end:
            continue
        decided = f"requeued by the watcher on {rescue.node}"
        launch = attempt.launches[-1] if attempt.launches else None
        if launch is not None:
            launch.decided = decided  # whatever was decided before, nobody was left to do it
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
