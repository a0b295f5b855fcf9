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


class _Setting(msgspec.Struct, frozen=True):
    value: Any


class _Recorded(msgspec.Struct, frozen=True):
    settings: dict[str, _Setting]


def policy(run_directory: Path, attempt: int) -> Policy:
    """Return the policy by which an attempt went; the default one where nothing tells it."""
    try:
        recorded = msgspec.json.decode(path_of(run_directory, attempt).read_bytes(), type=_Recorded)
        values = {
            key.removeprefix(_POLICY): found.value
            for key, found in recorded.settings.items()
            if key.startswith(_POLICY) and key.removeprefix(_POLICY) in Policy.__struct_fields__
        }
        return msgspec.convert(values, Policy)
    except (OSError, msgspec.MsgspecError):
        return Policy()


def changes(config: Config) -> dict[str, str]:
    """Return what is not the default, in words: for the log."""
    found = ((key, each) for key, each in config.values.items() if each.origin is not Origin.DEFAULT)
    return {key: redact(f"{shown(each.value)} ({each.where})") for key, each in found}
