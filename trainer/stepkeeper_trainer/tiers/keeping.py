"""Which steps stay in the cold tier: its newest, and what is pinned.  All in it are whole: they were read back."""

from __future__ import annotations

from collections.abc import Collection

from stepkeeper_trainer.tiers.tier import Held, Tier


def superfluous(steps: list[Held], *, keep: int | None, pinned: Collection[str]) -> list[Held]:
    """Return what goes: `steps` are all of a tier, newest first; None keeps all."""
    if keep is None:
        return []
    return [held for held in steps[keep:] if held.manifest.save_id not in pinned]


def prune(tier: Tier, *, keep: int | None, pinned: Collection[str]) -> list[str]:
    """Remove what is superfluous, oldest first, and what a kill has left of steps before the newest; return the names.

    Only while this run has nothing on its way there.  The newest step is looked at before anything older goes: where a
    file of it is missing, everything stays.

    Raises:
        TierError, OSError: the tier does not answer.
    """
    steps = tier.steps()
    if not steps or tier.problems(steps[0], deep=False):
        return []
    gone = superfluous(steps, keep=keep, pinned=pinned)
    removed = tier.sweep(steps)
    for held in reversed(gone):
        tier.remove(held)
        removed.append(held.directory)
    return removed
