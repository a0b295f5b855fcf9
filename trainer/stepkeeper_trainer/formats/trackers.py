"""`trackers.json` of the run directory: what experiment trackers call this run, so that each launch goes on in one run.

Rank 0 writes it; the supervisor reads it before a launch, for scripts that open the tracker's run themselves.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import msgspec

from stepkeeper_trainer.formats.decoding import DecodeError, decode
from stepkeeper_trainer.formats.durable import write_atomically
from stepkeeper_trainer.formats.plain import read_plain

if TYPE_CHECKING:
    from pathlib import Path

TRACKERS_NAME = "trackers.json"
MLFLOW_VARIABLE = "MLFLOW_RUN_ID"  # MLflow's own: `mlflow.start_run()` goes on in the run that it names
_ID = re.compile(r"[A-Za-z0-9_-]{1,128}")


class Known(msgspec.Struct, frozen=True, kw_only=True):
    """What trackers call this run."""

    mlflow_run_id: str | None = None


_decoder = msgspec.json.Decoder(Known)


def read_known(run_directory: Path) -> Known:
    """Return what trackers call the run; nothing where the file is missing, damaged or not plain."""
    try:
        known = decode(_decoder, read_plain(run_directory / TRACKERS_NAME, within=run_directory))
    except (OSError, DecodeError):
        return Known()
    named = known.mlflow_run_id
    return known if named is None or _ID.fullmatch(named) else Known()


def write_known(run_directory: Path, known: Known) -> None:
    """Record it durably.  Raises OSError."""
    write_atomically(run_directory / TRACKERS_NAME, msgspec.json.encode(known))
