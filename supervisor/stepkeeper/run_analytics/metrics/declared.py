"""Every metric, declared once, and the text that Prometheus reads (exposition format 0.0.4), by its own library.  Pure.

Counters count within an attempt: a requeued run begins anew, as `rate()` and `increase()` expect of counters.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from enum import StrEnum
from typing import NamedTuple

import msgspec

from stepkeeper.core.causes import Cause
from stepkeeper.core.losses import DISCONTINUITY, NOT_FINITE, SPIKE
from stepkeeper.core.state import Phase


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
