"""The agent's log: JSON lines with constant event names; below systemd each with its priority (sd-daemon(3))."""

from __future__ import annotations

import os
import sys
from typing import Any, TextIO, cast

import structlog

from stepkeeper.log import PatientStream
from stepkeeper.redaction import redact

PRIORITIES = {"debug": 7, "info": 6, "warning": 4, "error": 3, "critical": 2}


def stdout_is_journal() -> bool:
    """Tell whether our lines go to journald, as systemd says in JOURNAL_STREAM."""
    if sys.stdout is None:  # closed before we started
        return False
    device, _, inode = os.environ.get("JOURNAL_STREAM", "").partition(":")
    try:
        status = os.fstat(sys.stdout.fileno())
    except (OSError, ValueError):
        return False
    return (device, inode) == (str(status.st_dev), str(status.st_ino))


def configure(stream: PatientStream, *, journal: bool, **static: str) -> structlog.typing.FilteringBoundLogger:
    """Set up the log and return the logger.  `static` keys stand in every line."""

    def render(_: Any, __: str, event: structlog.typing.EventDict) -> str:
        """Put what a reader looks for first in front."""
        level = str(event.get("level", "info"))
        first = {key: event.pop(key) for key in ("timestamp", "level", "event") if key in event}
        rest = {key: redact(value) if isinstance(value, str) else value for key, value in event.items()}
        line = cast("str", json(None, "", {**first, **static, **rest}))
        return f"<{PRIORITIES.get(level, 6)}>{line}" if journal else line

    json = structlog.processors.JSONRenderer(sort_keys=False)
    structlog.configure(
        processors=[structlog.processors.add_log_level, structlog.processors.TimeStamper(fmt="iso", utc=True), render],
        wrapper_class=structlog.make_filtering_bound_logger(20),
        logger_factory=structlog.WriteLoggerFactory(cast("TextIO", stream)),
        cache_logger_on_first_use=True,
    )
    return cast("structlog.typing.FilteringBoundLogger", structlog.get_logger())
