"""Structured logs: text on stdout (or JSON, if asked for), and always JSON lines in a file of the run directory.

Event names are constant, values are keys; one line per decision with its `why`.  Lines are written by threads of
their own: stdout is a file on shared storage, and a full or hung one must not end or freeze the supervisor.
"""

from __future__ import annotations

import os
import queue
import stat
import sys
import threading
import time
from collections.abc import Callable
from enum import StrEnum
from typing import Any, TextIO, cast

import structlog

from stepkeeper.logtext import as_text
from stepkeeper.redaction import redact

LINES_WAITING_MAX = 10_000


class Form(StrEnum):
    """What a line on stdout looks like."""

    TEXT = "text"
    JSON = "json"
    JOURNAL = "journal"  # JSON, with its priority before it, as systemd reads it (sd-daemon(3))


Log = structlog.typing.FilteringBoundLogger
PRIORITIES = {"debug": 7, "info": 6, "warning": 4, "error": 3, "critical": 2}


class PatientStream:
    """A text stream that never blocks and never fails: what cannot be written is dropped, and counted."""

    def __init__(self, open_stream: Callable[[], TextIO | None]) -> None:
        """Open the stream on the thread that writes, with the first text.

        It may be none: `sys.stdout` is None where it was closed before we started, and at the interpreter's end.
        """
        self._open = open_stream
        self._waiting: queue.Queue[str | threading.Event] = queue.Queue(LINES_WAITING_MAX)
        self.dropped = 0
        threading.Thread(target=self._write, name="log", daemon=True).start()

    def write(self, text: str) -> int:
        """Hand over some text; returns at once."""
        try:
            self._waiting.put_nowait(text)
        except queue.Full:
            self.dropped += 1
        return len(text)

    def flush(self) -> None:
        """Do nothing: the thread flushes."""

    def drain(self, within_s: float) -> None:
        """Wait until what was handed over is written, or the time is up."""
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


class _Pair:
    """What structlog writes to: each line goes to stdout and to the file for programs, in the form of each."""

    def __init__(self, out: PatientStream, kept: PatientStream | None) -> None:
        self._out, self._kept = out, kept

    def write(self, shown: str, kept: str) -> None:
        """Hand over one line in both forms."""
        self._out.write(shown + "\n")
        if self._kept is not None:
            self._kept.write(kept + "\n")

    debug = info = warning = error = critical = write


def configure(out: PatientStream, kept: PatientStream | None = None, *, form: Form = Form.TEXT, **static: Any) -> Log:
    """Set up the log and return the logger.

    Args:
        out: stdout: for people, unless they ask for JSON there.
        kept: the file that always gets JSON, where there is one.
        form: of the lines on stdout.
        static: keys of every JSON line.  Bound here and not with contextvars: those do not enter new threads.
    """
    colour = sys.stdout is not None and sys.stdout.isatty()
    to_json = structlog.processors.JSONRenderer(sort_keys=False)

    def render(_: Any, __: str, event: structlog.typing.EventDict) -> tuple[tuple[str, str], dict[str, Any]]:
        """Put what a reader looks for first in front."""
        facts: dict[str, Any] = {key: _redacted(value) for key, value in event.items()}
        first: dict[str, Any] = {key: facts.pop(key) for key in ("timestamp", "level", "event") if key in facts}
        line = cast("str", to_json(None, "", {**first, **static, **facts}))
        shown = line
        if form is Form.TEXT:
            shown = as_text({**first, **facts}, time.time(), colour=colour)
        elif form is Form.JOURNAL:
            shown = f"<{PRIORITIES[first['level']]}>{line}"
        return (shown, line), {}

    structlog.configure(
        processors=[structlog.processors.add_log_level, structlog.processors.TimeStamper(fmt="iso", utc=True), render],
        wrapper_class=structlog.make_filtering_bound_logger(20),
        logger_factory=lambda *_: _Pair(out, kept),
        cache_logger_on_first_use=True,
    )
    return cast("Log", structlog.get_logger())


def _redacted(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_redacted(each) for each in value]
    return redact(value) if isinstance(value, str) else value
