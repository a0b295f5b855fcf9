"""The metrics as a file that is replaced atomically, for node_exporter's textfile collector; never fatal."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import structlog

from stepkeeper import __version__
from stepkeeper.config.rank_settings import parse_metrics_port
from stepkeeper.config.settings import RunSettings
from stepkeeper.core.exits import ExitCode
from stepkeeper.run_analytics.metrics import declared
from stepkeeper.run_analytics.metrics.tally import Tally
from stepkeeper.run_store.paths import RunDirectory
from stepkeeper.run_store.status import Status
from stepkeeper_trainer.formats.durable import write_atomically

EVERY_S = 15.0


class TextFile:
    """Writes the metrics for node_exporter's textfile collector, on a thread of its own."""

    def __init__(
        self, directory: Path, name: str, render: Callable[[], str], *, on_error: Callable[[OSError], None]
    ) -> None:
        self._path = directory / f"{name}.prom"
        self._render = render
        self._on_error = on_error
        self._closing = threading.Event()
        self._keep = self._failing = False
        self._thread = threading.Thread(target=self._write, name="metrics-file", daemon=True)
        self._thread.start()

    def close(self, within_s: float, *, keep: bool) -> None:
        """Write a last time, or remove the file: this node would serve the old figures for ever.

        Args:
            within_s: how long to wait for a directory that hangs.
            keep: the run needs a person, and the alert for that is made from this file.
        """
        self._keep = keep
        self._closing.set()
        self._thread.join(within_s)

    def _write(self) -> None:
        while not self._closing.is_set():
            self._replace()
            self._closing.wait(EVERY_S)
        if self._keep:
            self._replace()
            return
        try:
            self._path.unlink(missing_ok=True)
        except OSError as error:
            self._on_error(error)

    def _replace(self) -> None:
        try:
            write_atomically(self._path, self._render().encode(), mode=0o644)
            self._failing = False
        except OSError as error:
            if not self._failing:  # once, not every few seconds
                self._on_error(error)
            self._failing = True


# Starts what the settings ask for, around one supervisor.

CLOSE_WITHIN_S = 1.0
PERSON_FROM = ExitCode.TRAINING_FAILED  # exit codes from here on: the run does not continue without a person


@contextlib.contextmanager
def exported(
    settings: RunSettings,
    directory: RunDirectory,
    tally: Tally,
    status: Callable[[], Status],
    *,
    now: Callable[[], float],
    log: structlog.typing.FilteringBoundLogger,
) -> Iterator[None]:
    """Give the metrics out while the supervisor runs.  What cannot be done is logged, and training goes on."""

    def render() -> str:
        newest = status()
        common = {"run": directory.path.name, "job": str(newest.job_id)}
        return declared.text(tally.samples(newest, __version__, now()), common)

    with contextlib.ExitStack() as closing:
        if settings.metrics_textfile:
            file = TextFile(
                Path(settings.metrics_textfile),
                f"stepkeeper-{directory.run_id}",
                render,
                on_error=lambda error: log.warning("metrics_not_written", error=f"{error.filename}: {error.strerror}"),
            )
            closing.callback(lambda: file.close(CLOSE_WITHIN_S, keep=(status().exit_code or 0) >= PERSON_FROM))
        if settings.metrics_port is not None:
            from stepkeeper.run_analytics.metrics.port import Port  # noqa: PLC0415 - only who serves pays for http.server

            address, number = parse_metrics_port(settings.metrics_port)
            try:
                port = Port(address, number, render)
                closing.callback(port.close)
                log.info("metrics_served", address=address, port=port.number)
            except OSError as error:
                log.warning("metrics_not_served", address=address, error=str(error))
        yield
