"""Structured logs: JSON lines where stdout is no terminal, pretty where it is.

Event names are constant, values are keys; one line per decision with its `why`.
"""

from __future__ import annotations

import sys
from typing import Any, cast

import structlog


def configure(**static: Any) -> structlog.typing.FilteringBoundLogger:
    """Set up the log and return the logger.  `static` keys stand in every line.

    Bound here and not with contextvars: those do not enter new threads.
    """
    pretty = sys.stdout.isatty()
    renderer: structlog.typing.Processor = (
        structlog.dev.ConsoleRenderer() if pretty else structlog.processors.JSONRenderer(sort_keys=False)
    )

    def add_static(_: Any, __: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
        """Put what a reader looks for first in front."""
        first = {key: event.pop(key) for key in ("timestamp", "level", "event") if key in event}
        return {**first, **({} if pretty else static), **event}

    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            add_static,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(20),
        logger_factory=structlog.PrintLoggerFactory(sys.stdout),
        cache_logger_on_first_use=True,
    )
    return cast("structlog.typing.FilteringBoundLogger", structlog.get_logger())
