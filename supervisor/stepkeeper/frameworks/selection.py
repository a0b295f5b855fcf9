"""Which framework flag, STEPKEEPER_FRAMEWORK or configuration name; that of a directory else by recognition."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from stepkeeper.config import resolve
from stepkeeper.errors import UsageError
from stepkeeper.frameworks import recognise
from stepkeeper.frameworks.adapters.generic import Generic, Patterns
from stepkeeper.frameworks.framework import Framework
from stepkeeper.frameworks.recognise import AUTO, NONE, Finding


def select(path: Path, wanted: str | None, environment: Mapping[str, str]) -> Finding | None:
    """Return the framework of a directory, and why; None where none is recognised.

    Args:
        path: a checkpoint, or a directory of checkpoints.
        wanted: of `--framework`; None where it was not given.
        environment: settings and home.

    Raises:
        StepkeeperError: a variable, a configuration file or the name of a framework is wrong.
        OSError: the directory cannot be listed.
    """
    sources = resolve.gather({}, environment)
    value = sources.resolve().values["framework"]
    name, where = (wanted, "--framework") if wanted is not None else (str(value.value), value.where)
    frameworks = known(sources.generic)
    if name == NONE:
        return None
    if name == AUTO:
        return recognise.of_directory(path, frameworks)
    return named(name, where, frameworks, sources.generic)


def known(patterns: Patterns | None) -> dict[str, Framework]:
    """Return the adapters by name, `generic` with its patterns."""
    return {**recognise.known(), "generic": Generic(patterns)}


def named(name: str, where: str, frameworks: Mapping[str, Framework], patterns: Patterns | None) -> Finding:
    """Return the framework that a setting names.

    Raises:
        StepkeeperError: there is none of this name, or its patterns are missing.
    """
    if name not in frameworks:
        raise UsageError(
            f"{where}: {name!r} is no framework that is known; known are {AUTO}, {NONE}, {', '.join(frameworks)}"
        )
    if name == "generic" and patterns is None:
        raise UsageError(
            f"{where}: generic needs the patterns of [framework.generic] in a configuration file "
            "(~/.config/stepkeeper/config.toml)"
        )
    return Finding(frameworks[name], f"{where} names it")
