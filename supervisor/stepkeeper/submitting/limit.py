"""The time limit of an attempt, as sbatch reads it, beside the notice that comes before it.  Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence

from stepkeeper.core.exits import ExitCode
from stepkeeper.errors import StepkeeperError
from stepkeeper.printing import duration
from stepkeeper.submitting.script import SLURM_LATE_S

_FORM = re.compile(
    r"(?:(?P<days>\d+)-(?P<hours>\d+)(?::(?P<minutes>\d+))?(?::(?P<seconds>\d+))?|(?P<short>\d+(?::\d+){0,2}))"
)
_OPTION = re.compile(r"(?:--time[= ]|-t[ =]?)(?P<value>\S+)")


def seconds(text: str) -> float | None:
    """Return a limit as sbatch reads it; None for no limit, or words that only sbatch can judge.

    >>> seconds("90"), seconds("1:30"), seconds("2:00:00"), seconds("1-12"), seconds("1-00:30"), seconds("UNLIMITED")
    (5400.0, 90.0, 7200.0, 129600.0, 88200.0, None)
    """
    match = _FORM.fullmatch(text.strip())
    if match is None:
        return None
    if match["short"] is None:
        days, hours, minutes, rest = (int(match[name] or 0) for name in ("days", "hours", "minutes", "seconds"))
        found = ((days * 24 + hours) * 60 + minutes) * 60 + rest
    else:
        parts = [int(part) for part in match["short"].split(":")]
        in_seconds = {1: (60,), 2: (60, 1), 3: (3600, 60, 1)}[len(parts)]
        found = sum(part * each for part, each in zip(parts, in_seconds, strict=True))
    return float(found) or None  # 0 asks for no limit


def asked(time: str | None, options: Sequence[str]) -> str | None:
    """Return the limit that a job asks for: by `-t`, or among the other options of sbatch, whose last one counts."""
    named = [match["value"] for option in options if (match := _OPTION.fullmatch(option))]
    return named[-1] if named else time


def require_room(limit_s: float, notice_s: float, where: str) -> None:
    """Refuse a limit of which nothing is left for training.

    Args:
        limit_s: of one attempt.
        notice_s: before its end the supervisor is told.
        where: that limit comes from, for the error.

    Raises:
        StepkeeperError: each attempt would save and requeue itself as soon as it had started.
    """
    if limit_s <= notice_s + SLURM_LATE_S:
        raise StepkeeperError(
            f"{where}: the time limit of an attempt is {duration(limit_s)}, and {duration(notice_s)} before its end "
            f"(give or take {SLURM_LATE_S} s, Slurm is not exact) it saves and requeues itself: nothing is left for "
            "training; ask for more with -t, or say a shorter --notice-s",
            ExitCode.USAGE,
        )
