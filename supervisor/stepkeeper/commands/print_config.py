"""`stepkeeper run --print-config`: every setting, its value, and where that came from.  Needs no Slurm."""

from __future__ import annotations

from collections.abc import Mapping

from stepkeeper import printing
from stepkeeper.config import record
from stepkeeper.config.resolve import Config, Sources
from stepkeeper.config.settings import SETTINGS
from stepkeeper.config.values import shown
from stepkeeper.core.exits import ExitCode
from stepkeeper.errors import StepkeeperError
from stepkeeper.redaction import redact
from stepkeeper.store import rundir


def show(sources: Sources, environment: Mapping[str, str], *, as_json: bool) -> int:
    """Print the configuration of a run that would start here."""
    config, unknown = _resolve(sources, environment)
    if as_json:
        printing.say_json({**record.document(config), "run_directory_unknown": unknown or None}, indent=2)
        return ExitCode.FINISHED
    table = [("KEY", "VALUE", "UNIT", "FROM")]
    for key, found in config.values.items():
        where = found.origin.value + (f": {found.where}" if found.where else "")
        lock = f", locked in {found.locked}" if found.locked else ""
        table.append((key, redact(shown(found.value)), SETTINGS[key].about.unit or "-", redact(where + lock)))
    printing.say_table(table)
    if unknown:
        printing.warn(f"the run directory's own file is not among these: {unknown}")
    return ExitCode.FINISHED


def _resolve(sources: Sources, environment: Mapping[str, str]) -> tuple[Config, str]:
    """Return the configuration, and why the run directory is not known where that is so."""
    config = sources.resolve()
    try:
        path = rundir.expand(config.settings.run_dir, environment)
    except StepkeeperError as error:
        if "SLURM_JOB_ID" in environment:
            raise  # the job itself would end with it
        return config, str(error)
    return sources.resolve(path), ""
