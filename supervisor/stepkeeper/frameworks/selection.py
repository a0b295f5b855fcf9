"""Which framework `checkpoints` takes a directory for: flag, STEPKEEPER_FRAMEWORK, configuration, else recognition."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from stepkeeper.config import resolve
from stepkeeper.core.exits import ExitCode
from stepkeeper.errors import StepkeeperError
from stepkeeper.frameworks import recognise
from stepkeeper.frameworks.adapters.generic import Generic
from stepkeeper.frameworks.recognise import AUTO, Finding


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
    config = sources.resolve()
    frameworks = recognise.known()
    frameworks["generic"] = Generic(sources.generic)
    value = config.values["framework"]
    name, where = (wanted, "--framework") if wanted is not None else (str(value.value), value.where)
    if name == AUTO:
        return recognise.of_directory(path, frameworks)
    if name not in frameworks:
        raise StepkeeperError(
            f"{where}: {name!r} is no framework that is known; known are {AUTO}, {', '.join(frameworks)}",
            ExitCode.USAGE,
        )
    if name == "generic" and sources.generic is None:
        raise StepkeeperError(
            f"{where}: generic needs the patterns of [framework.generic] in a configuration file "
            f"({os.fspath(sources.user.path)})",
            ExitCode.USAGE,
        )
    return Finding(frameworks[name], f"{where} names it")
