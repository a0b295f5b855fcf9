"""Figures of a running supervisor for Prometheus: each declared once, counted, and given out.

`Tally` counts in the loop, a few dictionary updates a record; everything that can wait is on threads of its own.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import msgspec

from stepkeeper import __version__
from stepkeeper.config.rank_settings import parse_metrics_port
from stepkeeper.config.settings import RunSettings
from stepkeeper.core import effects as do
from stepkeeper.core import events as on
from stepkeeper.core import reasons as because
from stepkeeper.core.causes import Cause, Notice
from stepkeeper.core.exits import ExitCode
from stepkeeper.core.losses import DISCONTINUITY, NOT_FINITE, SPIKE
from stepkeeper.core.state import Phase
from stepkeeper.log import Log
from stepkeeper.run_store.journal import JournalWriter, Record
from stepkeeper.run_store.paths import RunDirectory
from stepkeeper.run_store.status import Status
from stepkeeper_trainer.formats.durable import write_atomically

# Every metric, declared once, and the text that Prometheus reads (exposition format 0.0.4), by its own library.
#
# Counters count within an attempt: a requeued run begins anew, as `rate()` and `increase()` expect of counters.


class Metric(msgspec.Struct, frozen=True):
    """One declared metric.  Its name gives the unit, and ends in `_total` where it counts."""

    name: str
    help: str
    labels: tuple[str, ...] = ()  # besides `run` and `job`
    values: tuple[str, ...] = ()  # of its label, where it is a counter

    @property
    def is_counter(self) -> bool:
        """Tell whether it counts; else it is a gauge."""
        return self.name.endswith("_total")


Values = dict[tuple[Metric, tuple[str, ...]], float]  # by a metric and its labels' values, as it declares them


def _gauge(name: str, text: str, *labels: str) -> Metric:
    return Metric(f"stepkeeper_{name}", text, labels)


def _counter(name: str, text: str, label: str = "", values: Iterable[str] = ()) -> Metric:
    return Metric(f"stepkeeper_{name}_total", text, (label,) if label else (), tuple(values))


INFO = _gauge("info", "Always 1; the version is a label.", "version")
UPDATED = _gauge("updated_timestamp_seconds", "When the supervisor last took in an event.")
STARTED = _gauge("attempt_started_timestamp_seconds", "When this attempt began.")
PHASE = _gauge("phase", "1 for the phase that the supervisor is in, 0 for the others.", "phase")
PHASE_SECONDS = _counter("phase_seconds", "Time that this attempt spent in a phase.", "phase", tuple(Phase))
SUSPENDED_SECONDS = _counter("suspended_seconds", "Time in which nothing of this attempt ran; it is in its phase, too.")
ATTEMPT = _gauge("attempt", "Number of the attempt, from 0: requeues so far.")
LAUNCH = _gauge("launch", "Number of the launch in this attempt, from 0: relaunches so far.")
STEP = _gauge("step", "Newest completed optimizer step.")
TOKENS = _gauge("tokens", "Tokens trained on up to the newest step.")
LOSS = _gauge("loss", "Loss of the newest step.")
STEP_SECONDS = _gauge("step_seconds", "Time that the newest step took.")
NODES = _gauge("nodes", "Nodes of the allocation that the run uses, spares included.")
CHECKPOINT_STEP = _gauge("checkpoint_step", "Step of the newest checkpoint that counts.")
CHECKPOINT_TIME = _gauge("checkpoint_timestamp_seconds", "When the newest checkpoint of this attempt was committed.")
CHECKPOINT_BYTES = _gauge("checkpoint_bytes", "Size of the newest checkpoint of this attempt.")
CHECKPOINT_SECONDS = _gauge("checkpoint_save_seconds", "From the request of that checkpoint to durable.")
FAILURES = _gauge("failures_without_progress", "Launches that failed since the last newly verified step.")
EXIT_CODE = _gauge("exit_code", "Exit code of the supervisor (docs/exit-codes.md); only when it has ended.")
CHECKPOINTS = _counter("checkpoints", "Saves that came to an end.", "outcome", ("committed", "failed"))
SAVE_SECONDS = _counter("checkpoint_save_seconds", "Time from request to durable, of all committed saves.")
LAUNCHES = _counter("launches", "Starts of the training step.")
LAUNCH_FAILURES = _counter(
    "launch_failures", "Launches that failed, by the verdict (docs/verdicts.md).", "cause", tuple(Cause)
)
LOSS_ANOMALIES = _counter(
    "loss_anomalies",
    "Times that the loss went wrong and stayed so: no finite number, or a jump.",
    "rule",
    (NOT_FINITE, SPIKE, DISCONTINUITY),
)
NODE_FAULTS = _counter("node_faults", "Faults of nodes that were reported.", "leave", ("yes", "no"))
NODES_LEFT = _counter("nodes_left", "Times that nodes were given up: lost, faulty or unfit.")
NOTICES = _counter(
    "notices",
    "Preemptions, time limits and other notices from Slurm.",
    "notice",
    ("preempted", "time_limit", "requeued", "cancelled"),
)
WATCHERS_LOST = _counter("watchers_lost", "Watchers that fell silent or ended.")
REPLAYS = _counter(
    "replays",
    "Resumes whose first steps were compared with the first time they were done.",
    "outcome",
    ("equal", "differs"),
)
NODES_SLOW = _counter("nodes_slow", "Times that a node was found to hold the others up.")
LAUNCHES_SLOW = _counter("launches_slow", "Launches that stepped slower than those before them.")
REQUEUES = _counter("requeues", "Requeues that were ordered.", "outcome", ("accepted", "refused"))

METRICS: tuple[Metric, ...] = tuple(each for each in list(globals().values()) if isinstance(each, Metric))


def text(values: Values, common: Mapping[str, str]) -> str:
    """Return the exposition: each metric once, with its help, type and values; `common` labels stand in all."""
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily  # noqa: PLC0415 - 2.5 MB, where wanted
    from prometheus_client.exposition import generate_latest  # noqa: PLC0415
    from prometheus_client.registry import Collector  # noqa: PLC0415

    families: dict[Metric, CounterMetricFamily | GaugeMetricFamily] = {}
    for each in METRICS:
        family = CounterMetricFamily if each.is_counter else GaugeMetricFamily
        families[each] = family(each.name, each.help, labels=(*common, *each.labels))
    for (metric, labels), value in values.items():
        # what is no UTF-8 becomes `?`, so that the whole file stays readable
        words = [label.encode(errors="replace").decode() for label in (*common.values(), *labels)]
        families[metric].add_metric(words, value)

    class Collected(Collector):
        def collect(self) -> Iterable[CounterMetricFamily | GaugeMetricFamily]:
            return [family for family in families.values() if family.samples]

    return generate_latest(Collected()).decode()


# Counts what the journal gets, and reads the status: the samples of one supervisor at one moment.

_NOTICES = {
    Notice.PREEMPTED: "preempted",
    Notice.TIME_LIMIT: "time_limit",
    Notice.REQUEUED: "requeued",
    Notice.CANCELLED: "cancelled",
}


class Tally:
    """The counters of an attempt.  `take` costs the loop microseconds; `values` is called from other threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # a series that began with its first count would have no increase: rates would miss what happens once
        self._values: Values = {
            (metric, labels): 0.0
            for metric in METRICS
            if metric.is_counter
            for labels in ([(value,) for value in metric.values] if metric.labels else [()])
        }
        self._phase: Phase | None = None
        self._counted_until = 0.0  # of the time in that phase
        self._losses = 0

    def take(self, record: Record) -> None:
        """Count one record."""
        with self._lock:
            before = self._phase
            self._count_phase(record.event.at)
            self._phase = record.phase
            self._take_event(record, before)
            for reason in record.reasons if isinstance(record.event, on.Progressed) else ():
                if isinstance(reason, because.LossWrong):
                    self._count(LOSS_ANOMALIES, reason.rule)
            for effect in record.effects:
                if isinstance(effect, do.StartLaunch):
                    self._count(LAUNCHES)
                elif isinstance(effect, do.ReportSlowNode) and not effect.over:
                    self._count(NODES_SLOW)
                elif isinstance(effect, do.ReportReplay):
                    self._count(REPLAYS, "equal" if effect.equal else "differs")
                elif isinstance(effect, do.ReportSlowLaunch):
                    self._count(LAUNCHES_SLOW)
            self._values[FAILURES, ()] = record.failures
            self._count(NODES_LEFT, by=record.node_losses - self._losses)
            self._losses = record.node_losses

    def _take_event(self, record: Record, before: Phase | None) -> None:  # noqa: C901 - one case an event
        match record.event:
            case on.AttemptStarted():
                self._losses = record.node_losses
            case on.CheckpointCommitted() as event:
                self._count(CHECKPOINTS, "committed")
                self._count(SAVE_SECONDS, by=event.seconds)
                self._values[CHECKPOINT_TIME, ()] = event.at
                self._values[CHECKPOINT_BYTES, ()] = event.bytes
                self._values[CHECKPOINT_SECONDS, ()] = event.seconds
            case on.SaveFailed():
                self._count(CHECKPOINTS, "failed")
            case on.NodeFaulted() as event:
                self._count(NODE_FAULTS, "yes" if event.leave else "no")
            case on.Judged() as event:
                self._count(LAUNCH_FAILURES, event.cause.value)
            case on.Suspended() as event:
                self._count(SUSPENDED_SECONDS, by=event.seconds)
            case on.WatcherLost():
                self._count(WATCHERS_LOST)
            case on.RequeueAnswered() as event:
                self._count(REQUEUES, "accepted" if event.ok else "refused")
            case on.SlurmAnswered() if before is not Phase.REQUEUEING:  # there it is the last look, no news
                said = record.reasons[0] if record.reasons else None
                if isinstance(said, because.SlurmSaid) and said.notice in _NOTICES:
                    self._count(NOTICES, _NOTICES[said.notice])
            case _:
                pass  # nothing that is counted

    def _count(self, metric: Metric, *labels: str, by: float = 1.0) -> None:
        self._values[metric, labels] = self._values.get((metric, labels), 0.0) + max(0.0, by)

    def _count_phase(self, until: float) -> None:
        if self._phase is not None and self._phase is not Phase.DONE:
            self._count(PHASE_SECONDS, self._phase.value, by=until - self._counted_until)
        self._counted_until = max(until, self._counted_until)

    def values(self, status: Status, version: str, now: float) -> Values:
        """Return everything as of now; `now` is Unix seconds by the supervisor's clock."""
        with self._lock:
            self._count_phase(now)
            return {**self._values, **_of_status(status, version)}


def _of_status(status: Status, version: str) -> Values:
    found: Values = {(INFO, (version,)): 1.0}
    found |= {(PHASE, (phase.value,)): float(phase.value == status.phase) for phase in Phase}
    values = {
        UPDATED: status.updated_at,
        STARTED: status.started_at,
        ATTEMPT: status.attempt,
        LAUNCH: status.launch,
        NODES: len(status.nodes),
        STEP: status.step,
        TOKENS: status.tokens,
        LOSS: status.loss,
        STEP_SECONDS: status.step_seconds,
        CHECKPOINT_STEP: status.checkpoint_step,
        EXIT_CODE: status.exit_code,
    }
    return found | {(metric, ()): float(value) for metric, value in values.items() if value is not None}


class TalliedJournal(JournalWriter):
    """A journal that counts what is written to it."""

    def __init__(self, path: Path, tally: Tally) -> None:
        super().__init__(path)
        self._tally = tally

    def append(self, record: Record) -> None:
        """Count a record, and hand it over; returns at once."""
        super().append(record)
        self._tally.take(record)


# The metrics as a file that is replaced atomically, for node_exporter's textfile collector; never fatal.

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
    log: Log,
) -> Iterator[None]:
    """Give the metrics out while the supervisor runs.  What cannot be done is logged, and training goes on."""

    def render() -> str:
        newest = status()
        common = {"run": directory.path.name, "job": str(newest.job_id)}
        return text(tally.values(newest, __version__, now()), common)

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
            from stepkeeper.run_analytics.serving import Port  # noqa: PLC0415 - only who serves pays for http.server

            address, number = parse_metrics_port(settings.metrics_port)
            try:
                port = Port(address, number, render)
                closing.callback(port.close)
                log.info("metrics_served", address=address, port=port.number)
            except OSError as error:
                log.warning("metrics_not_served", address=address, error=str(error))
        yield
