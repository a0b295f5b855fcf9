"""Saves that come to nothing, or to no end: who is told, and what is given back."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING

from stepkeeper_trainer.formats.messages import SaveFailed, shorten
from stepkeeper_trainer.log import warn
from stepkeeper_trainer.report import RankReport, publish_failure
from stepkeeper_trainer.tiers.directory import give_up

if TYPE_CHECKING:
    from stepkeeper_trainer.link import Link
    from stepkeeper_trainer.saves import Save
    from stepkeeper_trainer.storage import Guard
    from stepkeeper_trainer.tiers.placing import Placing

STUCK_AFTER_S = 15.0  # beyond its limit: between two pieces a save would have ended


class Failing:
    """Of one rank."""

    def __init__(self, *, rank: int, link: Link, guard: Guard, placing: Placing | None) -> None:
        """Prepare; rank 0 tells the supervisor."""
        self._rank, self._link, self._guard, self._placing = rank, link, guard, placing

    def failed(self, save: Save, why: str) -> None:
        """Tell that a save came to nothing, and give the disks back what this rank can."""
        warn("save_failed", step=save.summary.step, save_id=save.save_id, rank=self._rank, why=why)
        if not save.told_stuck:
            self._tell_supervisor(save, why)
        if self._placing is not None and save.local is not None:
            self._placing.forget(save.summary.step, save.save_id)
        if self._rank == 0:
            give_up(save.directory)  # nothing of it counts
            return
        with contextlib.suppress(OSError):  # rank 0 hears of it at the next boundary
            publish_failure(save.directory, RankReport(rank=self._rank, save_id=save.save_id, error=why))

    def if_stuck(self, save: Save | None) -> None:
        """Tell once of a save that hangs in the storage: it heeds no limit there, and no other begins beside it.

        Nothing can end its thread, which still reads what the next save would write: training goes on without saves
        until the storage answers.
        """
        if save is None or save.settled.is_set() or save.told_stuck or time.time() < save.limit_at + STUCK_AFTER_S:
            return
        save.told_stuck = True
        why = shorten(f"the storage does not answer: {save.at}")
        warn(
            "save_stuck",
            step=save.summary.step,
            save_id=save.save_id,
            rank=self._rank,
            why=why,
            to_do="look at the storage and this node's mount of it: no step is saved until it answers",
        )
        self._tell_supervisor(save, f"stuck: {why}")
        self._guard.trouble(why)

    def _tell_supervisor(self, save: Save, why: str) -> None:
        if self._rank == 0:
            failed = SaveFailed(
                step=save.summary.step, save_id=save.save_id, error=shorten(why), emergency=save.emergency
            )
            self._link.send(failed, keep=True)
