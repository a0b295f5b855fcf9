"""Structured logs: JSON lines where stdout is no terminal, pretty where it is.

Event names are constant, values are keys; one line per decision with its `why`.  Lines are written by a thread of
their own: stdout is a file on shared storage, and a full or hung one must not end or freeze the supervisor.
"""

from __future__ import annotations

import os
import queue
import stat
import sys
import threading
from collections.abc import Callable
from typing import Any, TextIO, cast

import structlog

from stepkeeper.redaction import redact

LINES_WAITING_MAX = 10_000


class PatientStream:
    """A text stream that never blocks and never fails: what cannot be written is dropped, and counted."""

    def __init__(self, open_stream: Callable[[], TextIO | None]) -> None:
        """Open the stream on the thread that writes, with the first text.

        It may be none: `sys.stdout` is None where it was closed before we started, and at the interpreter's end.
        """
        self._open = open_stream
        self._waiting: queue.Queue[str | threading.Event] = queue.Queue(LINES_WAITING_MAX)
        self.dropped = 0
        self._copy: PatientStream | None = None
        threading.Thread(target=self._write, name="log", daemon=True).start()

    def copy_to(self, other: PatientStream) -> None:
        """Hand all that comes from now on to another stream, too: where the one is lost, the other is not."""
        self._copy = other

    def write(self, text: str) -> int:
        """Hand over some text; returns at once."""
        if self._copy is not None:
            self._copy.write(text)
        try:
            self._waiting.put_nowait(text)
        except queue.Full:
            self.dropped += 1
        return len(text)

    def flush(self) -> None:
        """Do nothing: the thread flushes."""

    def drain(self, within_s: float) -> None:
        """Wait until what was handed over is written, or the time is up; for a copy, as long again."""
        if self._copy is not None:
            self._copy.drain(within_s)
        done = threading.Event()
        try:
            self._waiting.put(done, timeout=within_s)
        except queue.Full:
            return
        done.wait(within_s)

    def _write(self) -> None:
        stream: TextIO | None = None
        while True:
            item = self._waiting.get()
            if isinstance(item, threading.Event):
                item.set()
                continue
            try:
                stream = stream or self._open()
                if stream is None:
                    self.dropped += 1
                    continue
                stream.write(item)
                stream.flush()
            except (OSError, ValueError):  # a full disk, a quota, a closed stream: training goes on
                self.dropped += 1


def is_empty(stream: TextIO | None) -> bool:
    """Tell whether this is a file in which nothing stands."""
    if stream is None:
        return False
    try:
        status = os.fstat(stream.fileno())
    except (OSError, ValueError):
        return False  # no file at all, or a closed one
    return stat.S_ISREG(status.st_mode) and not status.st_size


def configure(stream: PatientStream, **static: Any) -> structlog.typing.FilteringBoundLogger:
    """Set up the log and return the logger.  `static` keys stand in every line.

    Bound here and not with contextvars: those do not enter new threads.
    """
    pretty = sys.stdout is not None and sys.stdout.isatty()
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
            _redacted,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(20),
        logger_factory=structlog.WriteLoggerFactory(cast("TextIO", stream)),
        cache_logger_on_first_use=True,
    )
    return cast("structlog.typing.FilteringBoundLogger", structlog.get_logger())


def _redacted(_: Any, __: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    return {key: redact(value) if isinstance(value, str) else value for key, value in event.items()}
