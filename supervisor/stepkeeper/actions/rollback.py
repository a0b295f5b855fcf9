"""Going back to an older step, on a thread of its own: one record in the lineage; nothing is deleted."""

from __future__ import annotations

from pathlib import Path

from stepkeeper.core import effects as do
from stepkeeper.core import events as on
from stepkeeper.core.reason_text import text
from stepkeeper.sources.inbox import Inbox, Part
from stepkeeper.store import tenure
from stepkeeper_trainer.formats import lineage, steps
from stepkeeper_trainer.formats.lease import Lease, LeaseError

WHY_CHARACTERS_MAX = 300


def roll_back(checkpoints: Path, effect: do.RollBack, ours: Lease, *, inbox: Inbox) -> None:
    """Have the lineage lead to the newest verified step below one; `RolledBack` or `Superseded` comes."""

    def work() -> None:
        try:
            newer = tenure.superseded(checkpoints.parent, ours)
        except (OSError, LeaseError):
            newer = None  # it cannot be told: the lease is watched besides
        at = inbox.clock.now()
        if newer is not None:
            inbox.put(on.Superseded(at=at, by_job_id=newer.job_id, by_restart_count=newer.restart_count))
            return
        try:
            chosen = _lead_back(checkpoints, effect, ours.attempt, at)
        except (OSError, LookupError) as error:
            why = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) else str(error.args[0])
            inbox.put(on.RolledBack(at=inbox.clock.now(), launch=effect.launch, error=why))
            return
        inbox.put(
            on.RolledBack(at=inbox.clock.now(), launch=effect.launch, directory=str(chosen.path), step=chosen.step)
        )

    inbox.run(
        Part.ROLL_BACK,
        work,
        answer=lambda error: on.RolledBack(at=inbox.clock.now(), launch=effect.launch, error=error),
    )


def _lead_back(checkpoints: Path, effect: do.RollBack, attempt: int, at: float) -> steps.StepDirectory:
    """Write the record.

    Raises:
        OSError: the step directories or the lineage cannot be read or written.
        LookupError: no older step is whole: going back to the very start is for a person to decide.
    """
    chosen = steps.newest_verified(checkpoints, below_step=effect.below_step).chosen
    if chosen is None or chosen.manifest is None:
        raise LookupError(f"no verified step directory is older than step {effect.below_step}")
    why = text(effect.reasons)[:WHY_CHARACTERS_MAX]
    left_out = tuple(lineage.LeftOut(step=each.step, steps=each.steps) for each in effect.skipped_data)
    if effect.suspect:
        counted = steps.current_lineage(steps.list_steps(checkpoints), lineage.read(checkpoints))
        for entry in counted:
            if entry.manifest is not None and entry.step >= effect.below_step:
                mark = lineage.Mark(at=at, attempt=attempt, save_id=entry.manifest.save_id, mark=lineage.SUSPECT)
                lineage.append(checkpoints, mark)
    save_id = chosen.manifest.save_id
    record = lineage.Rollback(at=at, attempt=attempt, save_id=save_id, why=why, left_out=left_out or None)
    lineage.append(checkpoints, record)
    return chosen
