"""What can go wrong in a rank that its user can mend: each with its exit code.

Codes are documented and never renumbered.  0 and 75 belong to `formats.records`; 1 is any other failure.
"""

from __future__ import annotations

import math


class StepkeeperError(Exception):
    """A clear message instead of a traceback: what, which, and what to do."""

    exit_code = 1


class UsageError(StepkeeperError):
    """The library or the script was called in a way that cannot work."""

    exit_code = 64


class LateError(StepkeeperError, RuntimeError):
    """Another rank did not come to where the ranks agree."""


class RankEndedError(StepkeeperError, RuntimeError):
    """Another rank ended while this one waited for it."""


class DamagedError(StepkeeperError):
    """A step directory does not hold the bytes that its manifest promises."""

    exit_code = 65


class ResumeError(StepkeeperError):
    """What to resume from is not there, or does not fit this model, optimizer or data."""

    exit_code = 66


class RunDirectoryError(StepkeeperError):
    """The run directory cannot be made or written."""

    exit_code = 73


class SupersededError(StepkeeperError):
    """A newer attempt holds the lease of this run."""

    exit_code = 77


class StateError(StepkeeperError):
    """The training state holds something that is neither a tensor nor JSON."""

    exit_code = 78


class SaveError(StepkeeperError):
    """A save came to nothing; older step directories are untouched."""


class CorruptionError(StepkeeperError):
    """A rank comes to other bits where it computes the same again: its GPU, or the node, computes wrongly."""


class UnequalError(SaveError):
    """Ranks hold different values under one name: nothing has failed, and the save is taken again with each value."""


class DriftError(UnequalError):
    """Only one of the values was written; which rank holds which is found out next."""


class DividedError(UnequalError):
    """The ranks have found out which rank holds which value: these are saved by other names from now on."""


class NoRoomError(SaveError):
    """The storage has no room for a save, or does not answer."""


def check_seconds(name: str, value: float) -> None:
    """Refuse a time limit that nothing can keep.  Raises UsageError."""
    if not (isinstance(value, (int, float)) and 0 < value < math.inf):
        raise UsageError(f"{name}={value!r}: give a number of seconds above 0")
