"""Where this user's runs are, so that a job id finds its run from anywhere: one small file a run, below the home.

A help for people, and nothing depends on it: a home that cannot be written costs the help, never a run.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

from stepkeeper_trainer.formats.durable import write_atomically

KEPT = 200
PATH_BYTES_MAX = 4096


def place(environment: Mapping[str, str]) -> Path | None:
    """Return the directory of these files; None where this user has no home."""
    state = environment.get("XDG_STATE_HOME", "")
    home = environment.get("HOME", "")
    if os.path.isabs(state):
        return Path(state, "stepkeeper", "runs")
    return Path(home, ".local", "state", "stepkeeper", "runs") if os.path.isabs(home) else None


def remember(run: Path, environment: Mapping[str, str]) -> None:
    """Note a run directory, and forget those that are gone or too many.

    Raises:
        OSError: the home cannot be written.
    """
    directory = place(environment)
    if directory is None:
        return
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    name = hashlib.sha256(os.fsencode(run)).hexdigest()[:16]
    write_atomically(directory / name, os.fsencode(run))
    for file in _newest_first(directory)[KEPT:]:
        file.unlink(missing_ok=True)


def runs(environment: Mapping[str, str]) -> list[Path]:
    """Return the run directories that are still there, the newest first."""
    directory = place(environment)
    if directory is None:
        return []
    try:
        files = _newest_first(directory)
    except OSError:
        return []  # nothing was ever noted, or the home is away
    found = []
    for file in files[:KEPT]:
        try:
            path = Path(os.fsdecode(file.read_bytes()[:PATH_BYTES_MAX]))
            if path.is_absolute() and path.is_dir():
                found.append(path)
        except (OSError, ValueError):
            continue  # removed meanwhile, or not a path
    return found


def _newest_first(directory: Path) -> list[Path]:
    with os.scandir(directory) as entries:
        files = [(entry.stat().st_mtime, entry.path) for entry in entries if not entry.name.startswith(".")]
    return [Path(path) for _, path in sorted(files, reverse=True)]
