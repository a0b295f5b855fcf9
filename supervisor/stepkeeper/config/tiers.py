"""What ranks are told of tiers: the settings' own variables, whatever they came from."""

from __future__ import annotations

import msgspec

from stepkeeper.config.settings import SETTINGS, RunSettings
from stepkeeper.core.exits import ExitCode
from stepkeeper.errors import StepkeeperError
from stepkeeper_trainer.tiers.tier import TierError, Tiers

_FIELDS = {  # of `Tiers`, by the setting's key
    "local_tier": "local",
    "cold_tier": "cold",
    "copy_rate": "megabytes_per_s",
    "cold_zstd": "cold_zstd",
    "local_keep": "local_keep",
    "cold_keep": "cold_keep",
    "peer_copies": "peers",
}


def tiers_of(settings: RunSettings) -> Tiers:
    """Return the tiers of a run.

    Raises:
        StepkeeperError: a setting makes no sense; a URL with a secret in it is not repeated.
    """
    values = {field: getattr(settings, key) for key, field in _FIELDS.items()}
    try:
        return msgspec.convert(values, Tiers).check()
    except TierError as error:
        raise StepkeeperError(str(error), ExitCode.USAGE) from error


def variables(settings: RunSettings) -> dict[str, str]:
    """Return what ranks find in their environment.  Raises StepkeeperError as `tiers_of`."""
    tiers = tiers_of(settings)
    if not tiers.any:
        return {}
    found = {}
    for key in _FIELDS:
        value = getattr(settings, key)
        if value is not None:
            found[SETTINGS[key].variable] = str(value).lower() if isinstance(value, bool) else str(value)
    return found
