"""What ranks get of the settings for saving, keeping and loading.  The trainer library reads it."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import msgspec

from stepkeeper.config.settings import SETTINGS, RunSettings
from stepkeeper.errors import UsageError
from stepkeeper_trainer.integrations import hook
from stepkeeper_trainer.tiers.tier import TierError, Tiers

PORT_MAX = 65535
_KEYS = ("checkpoint_every", "retention", "confirm_every")


def rank_variables(settings: RunSettings) -> dict[str, str]:
    """Return what ranks find in their environment: it counts instead of what the script says."""
    values = {SETTINGS[key].variable: getattr(settings, key) for key in _KEYS}
    return {variable: str(value) for variable, value in values.items() if variable and value is not None}


def attach_variables(settings: RunSettings) -> dict[str, str]:
    """Return what has each Python of the training attach: the setting, and where it may borrow our packages."""
    if settings.attach == "off":
        return {}
    found = [importlib.util.find_spec(name) for name in hook.LENT]
    origins = [Path(spec.origin) for spec in found if spec is not None and spec.origin is not None]
    directories = dict.fromkeys(str(origin.parent.parent) for origin in origins)
    return {
        hook.VARIABLE: settings.attach,
        hook.PACKAGES_VARIABLE: ":".join([sys.implementation.cache_tag or "", *directories]),
    }


# What ranks get of tiers: the settings' own variables, whatever they came from.

_FIELDS = {  # of `Tiers`, by the setting's key
    "local_tier": "local",
    "cold_tier": "cold",
    "copy_rate": "megabytes_per_s",
    "local_keep": "local_keep",
    "cold_keep": "cold_keep",
    "peer_copies": "peers",
    "peer_interface": "peer_interface",
    "snapshot_every": "snapshot_every",
    "snapshot_dir": "snapshot_directory",
}


def tiers_of(settings: RunSettings) -> Tiers:
    """Return the tiers of a run.

    Raises:
        StepkeeperError: a setting makes no sense; a URL with a secret in it is not repeated.
    """
    given = {field: getattr(settings, key) for key, field in _FIELDS.items()}
    values = {field: value for field, value in given.items() if value is not None}
    try:
        return msgspec.convert(values, Tiers).check()
    except TierError as error:
        raise UsageError(str(error)) from error


def tier_variables(settings: RunSettings) -> dict[str, str]:
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


# Texts with a form of their own: what could not be read later, by the ranks mostly, is refused where it is set.
#
# Each check raises ValueError: which part is wrong, and what to write.  They import the trainer library's own
# parsers, and only for a setting that is set: no other command has need of them.


def check_cadence(text: str, *, of_snapshots: bool = False) -> None:
    """Check `checkpoint_every`, or `snapshot_every`."""
    from stepkeeper_trainer import errors  # noqa: PLC0415
    from stepkeeper_trainer.coordinate.cadence import parse_rule, snapshot_rule  # noqa: PLC0415

    try:
        (snapshot_rule if of_snapshots else parse_rule)(text)
    except errors.UsageError as error:
        raise ValueError(str(error)) from error


def check_tier(key: str, text: str) -> None:
    """Check `local_tier`, `cold_tier` or `snapshot_dir`; a secret in a URL is not repeated."""
    try:
        msgspec.convert({_FIELDS[key]: text}, Tiers).check()
    except TierError as error:
        raise ValueError(str(error)) from error


def check_retention(text: str) -> None:
    """Check `retention`."""
    from stepkeeper_trainer.store.retention import parse_policy  # noqa: PLC0415

    parse_policy(text, total_steps=1)  # how many there are, the script knows


def check_slurm_client(text: str) -> None:
    """Check `slurm_client`."""
    name, colon, python = text.partition(":")
    if name not in {"commands", "pyslurm"} or (colon and (name == "commands" or not python)):
        raise ValueError("write commands, pyslurm, or pyslurm: and the interpreter that has it")


def parse_metrics_port(text: str) -> tuple[str, int]:
    """Return the address and the port of `metrics_port`.

    >>> parse_metrics_port("9400"), parse_metrics_port("0.0.0.0:0")
    (('127.0.0.1', 9400), ('0.0.0.0', 0))

    Raises:
        ValueError: it names none.
    """
    address, _, port = text.strip().rpartition(":")
    if not (port.isascii() and port.isdigit() and int(port) <= PORT_MAX):
        raise ValueError(f"write PORT or ADDRESS:PORT, with a port from 0 to {PORT_MAX}")
    return address or "127.0.0.1", int(port)
