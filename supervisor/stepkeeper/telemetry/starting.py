"""Starts what the settings ask for, around one supervisor."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import structlog

from stepkeeper import __version__
from stepkeeper.config.settings import RunSettings
from stepkeeper.core.exits import ExitCode
from stepkeeper.store.rundir import RunDirectory
from stepkeeper.store.status import Status
from stepkeeper.telemetry import metrics
from stepkeeper.telemetry.tally import Tally
from stepkeeper.telemetry.textfile import TextFile

CLOSE_WITHIN_S = 1.0
PERSON_FROM = ExitCode.TRAINING_FAILED  # exit codes from here on: the run does not go on by itself


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
        return metrics.text(tally.samples(newest, __version__, now()), common)

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
            from stepkeeper.telemetry.port import Port  # noqa: PLC0415 - only who serves pays for http.server

            try:
                port = Port(settings.metrics_address, settings.metrics_port, render)
                closing.callback(port.close)
                log.info("metrics_served", address=settings.metrics_address, port=port.number)
            except (OSError, OverflowError) as error:
                log.warning("metrics_not_served", address=settings.metrics_address, error=str(error))
        yield
