"""Figures of a running supervisor for Prometheus: each declared once, counted, and given out.

`Tally` counts in the loop, a few dictionary updates a record; everything that can wait is on threads of its own.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

import msgspec
import structlog

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
from stepkeeper.run_store.journal import JournalWriter, Record
from stepkeeper.run_store.paths import RunDirectory
from stepkeeper.run_store.status import Status
from stepkeeper_trainer.formats.durable import write_atomically

# Every metric, declared once, and the text that Prometheus reads (exposition format 0.0.4), by its own library.
#
# Counters count within an attempt: a requeued run begins anew, as `rate()` and `increase()` expect of counters.


class Kind(StrEnum):
    """What a metric is."""

    COUNTER = "counter"
    GAUGE = "gauge"


class Metric(msgspec.Struct, frozen=True):
    """One declared metric.  Its name gives the unit, and ends in `_total` where it counts."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()  # besides `run` and `job`
    values: tuple[str, ...] = ()  # of its label, where it is a counter

    @property
    def in_seconds(self) -> bool:
        """Tell whether it counts time."""
        return self.name.endswith("_seconds_total")


def _gauge(name: str, text: str, *labels: str) -> Metric:
    return Metric(f"stepkeeper_{name}", Kind.GAUGE, text, labels)


def _counter(name: str, text: str, label: str = "", values: Iterable[str] = ()) -> Metric:
    return Metric(f"stepkeeper_{name}_total", Kind.COUNTER, text, (label,) if label else (), tuple(values))


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


def counters() -> Iterator[tuple[Metric, tuple[str, ...]]]:
    """Yield each counter with each of its label's values."""
    for metric in METRICS:
        if metric.kind is Kind.COUNTER:
            yield from ((metric, (value,)) for value in metric.values) if metric.labels else [(metric, ())]


class Sample(NamedTuple):
    """One value of a metric."""

    metric: Metric
    value: float
    labels: tuple[str, ...] = ()  # in the order that the metric declares


def text(samples: Iterable[Sample], common: Mapping[str, str]) -> str:
    """Return the exposition: each metric once, with its help, type and samples; `common` labels stand in all."""
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily  # noqa: PLC0415 - 2.5 MB, where wanted
    from prometheus_client.exposition import generate_latest  # noqa: PLC0415
    from prometheus_client.registry import Collector  # noqa: PLC0415

    of_kind = {Kind.COUNTER: CounterMetricFamily, Kind.GAUGE: GaugeMetricFamily}
    families = {each: of_kind[each.kind](each.name, each.help, labels=(*common, *each.labels)) for each in METRICS}
    for metric, value, labels in samples:
        families[metric].add_metric(_utf8(*common.values(), *labels), value)

    class Collected(Collector):
        def collect(self) -> Iterable[CounterMetricFamily | GaugeMetricFamily]:
            return [family for family in families.values() if family.samples]

    return generate_latest(Collected()).decode()


def _utf8(*labels: str) -> list[str]:
    """Return labels' values; what is no UTF-8 becomes `?`, so that the whole file stays readable."""
    return [label.encode(errors="replace").decode() for label in labels]


# Counts what the journal gets, and reads the status: the samples of one supervisor at one moment.

_NOTICES = {
    Notice.PREEMPTED: "preempted",
    Notice.TIME_LIMIT: "time_limit",
    Notice.REQUEUED: "requeued",
    Notice.CANCELLED: "cancelled",
}


class Tally:
    """The counters of an attempt.  `take` costs the loop microseconds; `samples` is called from other threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # a series that began with its first count would have no increase: rates would miss what happens once
        self._counts = Counter({each: 0 for each in counters() if not each[0].in_seconds})
        self._seconds = {each: 0.0 for each in counters() if each[0].in_seconds}
        self._gauges: dict[Metric, float] = {}
        self._phase: Phase | None = None
        self._phase_since = 0.0
        self._losses = 0

    def take(self, record: Record) -> None:
        """Count one record."""
        with self._lock:
            before = self._phase
            self._take_phase(record)
            self._take_event(record, before)
            for reason in record.reasons if isinstance(record.event, on.Progressed) else ():
                if isinstance(reason, because.LossWrong):
                    self._counts[LOSS_ANOMALIES, (reason.rule,)] += 1
            for effect in record.effects:
                if isinstance(effect, do.StartLaunch):
                    self._counts[LAUNCHES, ()] += 1
                elif isinstance(effect, do.ReportSlowNode) and not effect.over:
                    self._counts[NODES_SLOW, ()] += 1
                elif isinstance(effect, do.ReportReplay):
                    self._counts[REPLAYS, ("equal" if effect.equal else "differs",)] += 1
                elif isinstance(effect, do.ReportSlowLaunch):
                    self._counts[LAUNCHES_SLOW, ()] += 1
            self._gauges[FAILURES] = record.failures
            if record.node_losses > self._losses:
                self._counts[NODES_LEFT, ()] += record.node_losses - self._losses
            self._losses = record.node_losses

    def _take_phase(self, record: Record) -> None:
        at = record.event.at
        if self._phase is None:
            self._phase_since = at
        else:
            self._add(PHASE_SECONDS, (self._phase.value,), max(0.0, at - self._phase_since))
            self._phase_since = max(at, self._phase_since)
        self._phase = record.phase

    def _take_event(self, record: Record, before: Phase | None) -> None:  # noqa: C901 - one case an event
        match record.event:
            case on.AttemptStarted():
                self._losses = record.node_losses
            case on.CheckpointCommitted() as event:
                self._counts[CHECKPOINTS, ("committed",)] += 1
                self._add(SAVE_SECONDS, (), max(0.0, event.seconds))
                self._gauges[CHECKPOINT_TIME] = event.at
                self._gauges[CHECKPOINT_BYTES] = event.bytes
                self._gauges[CHECKPOINT_SECONDS] = event.seconds
            case on.SaveFailed():
                self._counts[CHECKPOINTS, ("failed",)] += 1
            case on.NodeFaulted() as event:
                self._counts[NODE_FAULTS, ("yes" if event.leave else "no",)] += 1
            case on.Judged() as event:
                self._counts[LAUNCH_FAILURES, (event.cause.value,)] += 1
            case on.Suspended() as event:
                self._add(SUSPENDED_SECONDS, (), max(0.0, event.seconds))
            case on.WatcherLost():
                self._counts[WATCHERS_LOST, ()] += 1
            case on.RequeueAnswered() as event:
                self._counts[REQUEUES, ("accepted" if event.ok else "refused",)] += 1
            case on.SlurmAnswered() if before is not Phase.REQUEUEING:  # there it is the last look, no news
                match record.reasons[:1]:
                    case (because.SlurmSaid(notice=notice),) if notice in _NOTICES:
                        self._counts[NOTICES, (_NOTICES[notice],)] += 1
                    case _:
                        pass
            case _:
                pass  # nothing that is counted

    def _add(self, metric: Metric, labels: tuple[str, ...], seconds: float) -> None:
        key = (metric, labels)
        self._seconds[key] += seconds

    def samples(self, status: Status, version: str, now: float) -> list[Sample]:
        """Return everything as of now; `now` is Unix seconds by the supervisor's clock."""
        with self._lock:
            found = [Sample(metric, value, labels) for (metric, labels), value in self._counts.items()]
            seconds = dict(self._seconds)
            gauges = dict(self._gauges)
            if self._phase is not None and self._phase is not Phase.DONE:
                key = (PHASE_SECONDS, (self._phase.value,))
                seconds[key] += max(0.0, now - self._phase_since)
        found += [Sample(metric, value, labels) for (metric, labels), value in seconds.items()]
        found += [Sample(metric, value) for metric, value in gauges.items()]
        return [*found, *_of_status(status, version)]


def _of_status(status: Status, version: str) -> Iterator[Sample]:
    yield Sample(INFO, 1, (version,))
    for phase in Phase:
        yield Sample(PHASE, float(phase.value == status.phase), (phase.value,))
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
    for metric, value in values.items():
        if value is not None:
            yield Sample(metric, float(value))


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
    log: structlog.typing.FilteringBoundLogger,
) -> Iterator[None]:
    """Give the metrics out while the supervisor runs.  What cannot be done is logged, and training goes on."""

    def render() -> str:
        newest = status()
        common = {"run": directory.path.name, "job": str(newest.job_id)}
        return text(tally.samples(newest, __version__, now()), common)

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
