"""Words to systemd, the only place that imports `sdnotify`.  Without NOTIFY_SOCKET they go nowhere."""

from __future__ import annotations

import os

from stepkeeper.core.exits import ExitCode
from stepkeeper.errors import StepkeeperError


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
