"""How a script's own loop saves, kept in the run directory: a launch learns it at the first save, the next one has it.

So a notice between a resume and the script's next save is answered, too.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from stepkeeper_trainer.environment import read_environment
from stepkeeper_trainer.errors import StepkeeperError
from stepkeeper_trainer.formats import records
from stepkeeper_trainer.log import warn

if TYPE_CHECKING:
    from pathlib import Path


def keep(saves: records.OwnSaves) -> None:
    """Keep how the script saves, for launches that follow; one rank calls it."""
    directory = _run_directory()
    try:
        if directory is not None and records.read_own_saves(directory) != saves:
            records.write_own_saves(directory, saves)
    except (OSError, ValueError) as error:
        warn("saves_not_remembered", framework=saves.framework, why=str(error))


def forget() -> None:
    """Forget it: nobody else can save as the script does."""
    directory = _run_directory()
    try:
        if directory is not None:
            (directory / records.OWN_SAVES_NAME).unlink(missing_ok=True)
    except OSError as error:
        warn("saves_not_forgotten", why=str(error))


def of(framework: str, loaded_from: str) -> records.OwnSaves | None:
    """Return how the script saves to the directory of a checkpoint that it has loaded; None: it is not known."""
    directory = _run_directory()
    try:
        found = records.read_own_saves(directory) if directory is not None else None
    except (OSError, ValueError) as error:
        warn("saves_not_remembered", framework=framework, why=str(error))
        return None
    same = found is not None and os.path.realpath(found.directory) == os.path.realpath(os.path.dirname(loaded_from))
    return found if same and found is not None and found.framework == framework else None


def _run_directory() -> Path | None:
    try:
        return read_environment().run_directory
    except StepkeeperError:
        return None  # `attach` reports it
