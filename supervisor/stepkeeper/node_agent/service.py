"""The agent's log: JSON lines with constant event names; below systemd each with its priority (sd-daemon(3))."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any, TextIO, cast

import msgspec
import structlog

from stepkeeper import loop_tools
from stepkeeper.core.exits import ExitCode
from stepkeeper.errors import StepkeeperError
from stepkeeper.log import PatientStream
from stepkeeper.node_agent.core.events import Event
from stepkeeper.node_agent.sensors.readings import Reading
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


def configure_log(stream: PatientStream, *, journal: bool, **static: str) -> structlog.typing.FilteringBoundLogger:
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


# Words to systemd, the only place that imports `sdnotify`.  Without NOTIFY_SOCKET they go nowhere.


class Systemd:
    """READY, STATUS, WATCHDOG and STOPPING.  The watchdog is fed by the agent's loop, and by nothing else."""

    def __init__(self) -> None:
        """Raises `StepkeeperError` where systemd waits for words and nobody can say them."""
        self._notifier = None
        if os.environ.get("NOTIFY_SOCKET"):
            try:
                import sdnotify  # noqa: PLC0415 - only here, and only below systemd
            except ImportError as error:
                raise StepkeeperError(
                    "systemd waits for a word (Type=notify): pip install sdnotify", ExitCode.USAGE
                ) from error
            self._notifier = sdnotify.SystemdNotifier()
            self._notifier.socket.settimeout(0)  # a systemd that does not listen must not stop the loop
        microseconds = os.environ.get("WATCHDOG_USEC", "")
        for_us = os.environ.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        self.watchdog_every_s = float(microseconds) / 1e6 / 3 if microseconds.isdigit() and for_us else None

    def say(self, **words: str) -> None:
        """Say `READY="1"`, `STATUS="..."` and the like, in one message."""
        if self._notifier is not None:
            text = "\n".join(f"{key}={value}".replace("\n", " ") for key, value in words.items())
            self._notifier.notify(text)


# The one queue between the agent's threads and its loop.

WAITING_MAX = 5000
"""So many readings may wait; then their sensor waits, and the kernel's ring buffer keeps the rest."""
PATIENCE_S = 0.05


class Stop(msgspec.Struct, frozen=True):
    """The agent shall end."""

    why: str


class Do(msgspec.Struct, frozen=True):
    """Something that must happen on the loop's own thread."""

    what: Callable[[], None]


Item = Event | Reading | Stop | Do


class Inbox(loop_tools.Inbox[Item]):
    """Events, readings and words on their way to the loop."""

    def put_patiently(self, item: Item) -> None:
        """Hand over one item of a source that may flood us: wait while the loop is behind."""
        while self._queue.qsize() > WAITING_MAX:
            time.sleep(PATIENCE_S)
        self._queue.put(item)


# SIGTERM and SIGINT end the agent in order.

STOPPING = (signal.SIGTERM, signal.SIGINT)


def listen_for_signals(inbox: Inbox) -> None:
    """Put a `Stop` into the inbox for each such signal.  Once a process, on the main thread."""
    loop_tools.listen_for_signals(STOPPING, lambda number: inbox.put(Stop(why=number.name)), inbox.run_thread)
