"""The places where step directories are kept: a node's own disk, shared storage, an object store.

A step is committed in the first of them and copied to the next in the background.  Bytes are compared with the
manifest on the way, data come first and the manifest last, and what is interrupted goes on where it was.
Needs no torch; the object store needs the extra `object`.
"""

from __future__ import annotations

from stepkeeper_trainer.tiers.copying import Pace, Pushed, copy_step
from stepkeeper_trainer.tiers.directory import DirectoryTier, open_tier
from stepkeeper_trainer.tiers.survey import Newest, newest_anywhere
from stepkeeper_trainer.tiers.tier import DamagedCopyError, Held, Tier, TierError

__all__ = [
    "DamagedCopyError",
    "DirectoryTier",
    "Held",
    "Newest",
    "Pace",
    "Pushed",
    "Tier",
    "TierError",
    "copy_step",
    "newest_anywhere",
    "open_tier",
]
