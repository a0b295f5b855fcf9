"""The last lines of a log that look like errors, whatever the rules make of them.  Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable

from stepkeeper.verdict.reading import Line, Log

LINES_MAX = 8
CHARACTERS_MAX = 300
_ERROR_LIKE = re.compile(
    r"(?i)error\b|exception|\bfail(?:ed|ure|s)?\b|\bfatal\b|panic|abort(?:ed|ing)?\b|\bkill(?:ed|ing)\b|refused|denied"
    r"|\bcannot\b|can't|could not|couldn't|unable to|timed? ?out|terminat|\bsig[a-z]{3,5}\b|no such|not found"
    r"|core dumped|assert|out of memory|\boom\b|\bnan\b|corrupt|invalid|unreachable|expired"
)
_CHATTER = re.compile(
    r"NCCL INFO|^Traceback|(?i:\bwarn(?:ing)?\b)|^\s+File \"|^frame #\d+|^\s*[~^]+\s*$|\b0 (?:errors|failures)\b"
)


def error_lines(log: Log, *, rank: int | None = None) -> tuple[Line, ...]:
    """Return the last error-like lines of a log, of one rank where it has any; else simply its last lines."""
    said = [line for line in log.lines if line.text.strip()]
    of_rank = [line for line in said if line.rank == rank] if rank is not None else []
    for lines in (of_rank, said):
        found = _distinct(line for line in lines if _ERROR_LIKE.search(line.text) and not _CHATTER.search(line.text))
        if found:
            return tuple(found[-LINES_MAX:])
    return tuple((of_rank or said)[-LINES_MAX:])


def _distinct(lines: Iterable[Line]) -> list[Line]:
    """Return lines without those that say the same as the one before."""
    found: list[Line] = []
    for line in lines:
        if not found or found[-1].text != line.text:
            found.append(line)
    return found
