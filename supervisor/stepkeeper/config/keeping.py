"""What ranks are told of saving, keeping and loading.  The trainer library reads it."""

from __future__ import annotations

from stepkeeper.config.settings import SETTINGS, RunSettings

_KEYS = ("checkpoint_every", "retention", "load_memory_gib")


def variables(settings: RunSettings) -> dict[str, str]:
    """Return what ranks find in their environment: it counts instead of what the script says."""
    values = {SETTINGS[key].variable: getattr(settings, key) for key in _KEYS}
    return {variable: str(value) for variable, value in values.items() if variable and value is not None}
