"""A tier by its name: a path, or the URL of an object store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from stepkeeper_trainer.tiers.directory import DirectoryTier
from stepkeeper_trainer.tiers.tier import Tier, TierError


def open_tier(where: str, **config: Any) -> Tier:
    """Return the tier at a path or URL; `config` is for `DirectoryTier` or `ObjectTier`.

    Raises:
        TierError: the URL makes no sense, or the library for object stores is missing.
    """
    if "://" not in where:
        return DirectoryTier(Path(where), **config)
    try:
        from stepkeeper_trainer.tiers.objects import ObjectTier  # noqa: PLC0415 - for those who have one
    except ImportError as error:
        raise TierError(f"{where}: an object store needs a library: pip install 'stepkeeper[object]'") from error
    return ObjectTier(where, **config)
