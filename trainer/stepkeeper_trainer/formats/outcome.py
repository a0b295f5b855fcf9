"""`outcome.json`: what the ranks say of how they ended; it counts more than any exit code."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import msgspec

from stepkeeper_trainer.formats.durable import write_atomically
from stepkeeper_trainer.formats.records import read_record

if TYPE_CHECKING:
    from pathlib import Path

FORMAT = 1
OUTCOME_NAME = "outcome.json"
EXIT_FINISHED = 0
EXIT_STOPPED = 75  # EX_TEMPFAIL: stopped on request, state saved


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """Rank 0 writes it as the last act of a launch that ended as intended."""

    format: int = FORMAT
    outcome: Literal["finished", "stopped"]
    step: int
    tokens: int
    save_id: str | None
    launch: str  # "ATTEMPT.LAUNCH": an older launch's word is not taken for this one's
    at: float  # Unix seconds


class OutcomeError(msgspec.MsgspecError, ValueError):
    """The outcome file does not parse, or a newer Stepkeeper wrote it."""


_decoder = msgspec.json.Decoder(Outcome)


def read(run_directory: Path) -> Outcome | None:
    """Return what the newest launch that ended as intended said; None where none did.

    Raises:
        OSError: the file is there and cannot be read.
        OutcomeError: it is no outcome, or one of a newer format.
    """
    return read_record(
        run_directory / OUTCOME_NAME, _decoder, newest=FORMAT, error=OutcomeError, otherwise="not an outcome"
    )


def write(run_directory: Path, outcome: Outcome) -> None:
    """Record the outcome durably.  Raises OSError."""
    write_atomically(run_directory / OUTCOME_NAME, msgspec.json.encode(outcome), mode=0o644)
