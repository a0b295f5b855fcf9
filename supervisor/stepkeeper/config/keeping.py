"""What ranks are told of saving and keeping: how often to save, which steps stay.  The trainer library reads both."""

from __future__ import annotations

from stepkeeper.config.settings import SETTINGS, RunSettings

_KEYS = ("checkpoint_every", "retention")


def variables(settings: RunSettings) -> dict[str, str]:
    """Return what ranks find in their environment: it counts instead of what the script says."""
    values = {SETTINGS[key].variable: getattr(settings, key) for key in _KEYS}
    return {variable: value for variable, value in values.items() if variable and value}
