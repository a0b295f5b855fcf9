"""What rank 0 does after each commit beside training: older steps are removed as the policy says.

By what rules that is, and which other places have steps, it records at the start, for those who look later.
"""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING

from stepkeeper_trainer.errors import UsageError
from stepkeeper_trainer.formats import keeping, lineage
from stepkeeper_trainer.formats.messages import shorten
from stepkeeper_trainer.formats.reading import Reading
from stepkeeper_trainer.log import say, warn
from stepkeeper_trainer.store.retention import Outcome, Policy, Pruner, parse_policy

if TYPE_CHECKING:
    from stepkeeper_trainer.save.commit import Commits
    from stepkeeper_trainer.save.listeners import CommittedStep
    from stepkeeper_trainer.tiers.config import Tiers
    from stepkeeper_trainer.tiers.tiering import Tiering


READ_THREADS = 2  # each new step is read once to be counted: training has the other cores
READ_BYTES_PER_S = 2e9
BEHIND_STEPS = 3  # committed while it reads older ones: it is too slow for them
STOP_WITHIN_S = 5.0  # it stops between two reads, unless the storage hangs


class Retention:
    """Removes steps that no rule wants, once newer ones are verified."""

    def __init__(self, commits: Commits, policy: Policy) -> None:
        """Prepare; nothing is done before the first commit."""
        self._blocked: str | None = None
        self._look, self._meanwhile = 0, 0  # the look that is under way, and commits since it began
        self._behind = False
        self._pruner = Pruner(
            commits.checkpoints,
            policy,
            on_done=self._done,
            on_error=_failed,
            fence=commits.check_fence,
            reading=Reading(threads=READ_THREADS, bytes_per_s=READ_BYTES_PER_S),
        )

    def committed(self, _step: CommittedStep) -> None:
        """Look at the steps soon."""
        if self._pruner.looking:
            self._note_late(self._pruner.looks)
        self._pruner.request()

    def _note_late(self, look: int) -> None:
        """Say it once when steps come faster than they are read: they pile up, for only read ones are removed."""
        self._meanwhile = self._meanwhile + 1 if look == self._look else 1
        self._look = look
        if self._meanwhile < BEHIND_STEPS or self._behind:
            return
        self._behind = True
        warn(
            "retention_behind",
            steps=self._meanwhile,
            why=f"older ones are still being read, by rank 0 alone and at most at {READ_BYTES_PER_S / 1e9:g} GB/s, and "
            "removed: save less often, or have all nodes read with `--read-back all`",
        )

    def request(self) -> None:
        """Look at the steps soon, for space is short."""
        self._pruner.request()

    def close(self, limit_at: float) -> None:
        """Stop; what is not done now is done after the next commit."""
        if not self._pruner.close(max(0.0, min(STOP_WITHIN_S, limit_at - time.time()))):
            warn("retention_late", why="it still waits for the storage: it is left behind")

    def _done(self, outcome: Outcome) -> None:
        if outcome.removed:
            say("steps_removed", steps=",".join(outcome.removed), kept=len(outcome.plan.kept))
        for name, why in outcome.spared:
            say("step_spared", step=name, why=why)
        if outcome.plan.blocked != self._blocked and outcome.plan.blocked is not None:
            warn("retention_blocked", why=outcome.plan.blocked)
        self._blocked = outcome.plan.blocked


def keep_house(commits: Commits, policy: Policy | None, tiering: Tiering | None, rank: int) -> Retention | None:
    """Record how steps are kept, and return what removes those that need not be; on rank 0, else nothing is done."""
    if rank != 0:
        return None
    try:
        keeping.write(commits.run_directory, _keeping(commits, policy, tiering.tiers if tiering is not None else None))
    except OSError as error:
        warn("keeping_unrecorded", why=error)  # it is for those who look later: training does without
    return Retention(commits, policy) if policy is not None else None


def _keeping(commits: Commits, policy: Policy | None, tiers: Tiers | None) -> keeping.Keeping:
    launch, at = commits.environment.launch_name, time.time()
    places = []
    if tiers is not None and tiers.local is not None:
        places.append(keeping.Place(kind="local", where=tiers.local, launch=launch, at=at))
    if tiers is not None and tiers.cold is not None:
        places.append(keeping.Place(kind="cold", where=tiers.cold, launch=launch, at=at))
    return keeping.Keeping(
        launch=launch,
        at=at,
        retention=dataclasses.asdict(policy) if policy is not None else None,
        places=tuple(places),
    )


def choose_policy(environment: str | None, wanted: str | Policy | None, *, total_steps: int | None) -> Policy | None:
    """Return the policy that counts: the environment's, else the script's, else the usual one; None keeps all steps.

    Raises:
        UsageError: it cannot be read or meant.
    """
    choice = environment if environment is not None else wanted
    if choice is None:
        return Policy(total_steps=total_steps)
    if isinstance(choice, Policy):
        return choice
    try:
        return parse_policy(choice, total_steps=total_steps)
    except ValueError as error:
        raise UsageError(str(error)) from error


def _failed(error: Exception) -> None:
    warn("retention_failed", why=shorten(f"{type(error).__name__}: {error}"))


def mark_epoch_end(commits: Commits, save_id: str) -> None:
    """Mark a save as the end of an epoch, before it is committed: a crash between the two costs no milestone.

    Raises:
        OSError: the lineage cannot be written.
    """
    lineage.append(commits.checkpoints, lineage.Mark(at=time.time(), save_id=save_id, mark=lineage.EPOCH))
