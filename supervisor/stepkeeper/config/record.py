"""`attempts/attempt-000/config.json` of the run directory: by what an attempt went, and where it came from."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Any

import msgspec

from stepkeeper import __version__
from stepkeeper.config.resolve import Config, Origin
from stepkeeper.config.settings import SETTINGS
from stepkeeper.config.values import shown
from stepkeeper.core.policy import Policy
from stepkeeper.redaction import redact
from stepkeeper_trainer.formats.durable import write_atomically
from stepkeeper_trainer.formats.plain import read_plain

FORMAT = 1
NAME = "config.json"
_POLICY = "policy."


def path_of(run_directory: Path, attempt: int) -> Path:
    """Return where the configuration of an attempt stands."""
    return run_directory / "attempts" / f"attempt-{attempt:03d}" / NAME


def document(config: Config) -> dict[str, Any]:
    """Return the configuration as a JSON document: each value, its unit and its origin.  No secret."""
    return {
        "format": FORMAT,
        "stepkeeper": __version__,
        "files": [{"origin": file.role.value, "path": str(file.path)} for file in config.files],
        "settings": {
            key: {
                "value": redact(found.value) if isinstance(found.value, str) else found.value,
                "unit": SETTINGS[key].about.unit,
                "origin": found.origin.value,
                "where": redact(found.where),
                "locked": found.locked,
            }
            for key, found in config.values.items()
        },
    }


def write(run_directory: Path, attempt: int, config: Config) -> Path:
    """Write the configuration of an attempt; the group may read it where it may read the run directory.

    Raises:
        OSError: it was not written.
    """
    path = path_of(run_directory, attempt)
    group = run_directory.stat().st_mode & (stat.S_IRGRP | stat.S_IXGRP)
    for directory in (path.parent.parent, path.parent):
        try:
            directory.mkdir(mode=0o700)
        except FileExistsError:
            continue
        directory.chmod(0o700 | group)
    data = msgspec.json.format(msgspec.json.encode(document(config)), indent=1) + b"\n"
    write_atomically(path, data, mode=0o600 | (group & stat.S_IRGRP))
    return path


class Recorded(msgspec.Struct, frozen=True, kw_only=True):
    """What a reader wants to know of such a record."""

    stepkeeper: str = ""  # its version
    settings: dict[str, dict[str, Any]] = {}

    def chosen(self) -> dict[str, str]:
        """Return the settings that are not the defaults, each with where it came from."""
        found = ((key, each) for key, each in self.settings.items() if each.get("origin") != Origin.DEFAULT.value)
        return {key: f"{each.get('value')} ({each.get('where', '')})" for key, each in found}

    def policy(self) -> Policy:
        """Return the policy of the attempt; the default one where nothing tells it.

        What was a setting then and is a constant now has the value that it had.
        """
        values = {
            key.removeprefix(_POLICY): found.get("value")
            for key, found in self.settings.items()
            if key.startswith(_POLICY) and key.removeprefix(_POLICY) in Policy.__struct_fields__
        }
        try:
            return msgspec.convert(values, Policy)
        except msgspec.ValidationError:
            return Policy()


def read(run_directory: Path, attempt: int) -> Recorded:
    """Return what an attempt went by; nothing where it never got so far, or the record cannot be read."""
    try:
        return msgspec.json.decode(read_plain(path_of(run_directory, attempt), within=run_directory), type=Recorded)
    except (OSError, msgspec.MsgspecError):
        return Recorded()


def changes(config: Config) -> dict[str, str]:
    """Return what is not the default, in words: for the log."""
    found = ((key, each) for key, each in config.values.items() if each.origin is not Origin.DEFAULT)
    return {key: redact(f"{shown(each.value)} ({each.where})") for key, each in found}
