"""Counts what the journal gets, and reads the status: the samples of one supervisor at one moment."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from stepkeeper.core import effects as do
from stepkeeper.core import events as on
from stepkeeper.core import reasons as because
from stepkeeper.core.causes import Notice
from stepkeeper.core.state import Phase
from stepkeeper.run_analytics.metrics import declared
from stepkeeper.run_analytics.metrics.declared import Metric, Sample
from stepkeeper.run_store.journal import JournalWriter, Record
from stepkeeper.run_store.status import Status

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
        self._counts = Counter({each: 0 for each in declared.counters() if not each[0].in_seconds})
        self._seconds = {each: 0.0 for each in declared.counters() if each[0].in_seconds}
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
                    self._counts[declared.LOSS_ANOMALIES, (reason.rule,)] += 1
            for effect in record.effects:
                if isinstance(effect, do.StartLaunch):
                    self._counts[declared.LAUNCHES, ()] += 1
                elif isinstance(effect, do.ReportSlowNode) and not effect.over:
                    self._counts[declared.NODES_SLOW, ()] += 1
                elif isinstance(effect, do.ReportReplay):
                    self._counts[declared.REPLAYS, ("equal" if effect.equal else "differs",)] += 1
                elif isinstance(effect, do.ReportSlowLaunch):
                    self._counts[declared.LAUNCHES_SLOW, ()] += 1
            self._gauges[declared.FAILURES] = record.failures
            if record.node_losses > self._losses:
                self._counts[declared.NODES_LEFT, ()] += record.node_losses - self._losses
            self._losses = record.node_losses

    def _take_phase(self, record: Record) -> None:
        at = record.event.at
        if self._phase is None:
            self._phase_since = at
        else:
            self._add(declared.PHASE_SECONDS, (self._phase.value,), max(0.0, at - self._phase_since))
            self._phase_since = max(at, self._phase_since)
        self._phase = record.phase

    def _take_event(self, record: Record, before: Phase | None) -> None:  # noqa: C901 - one case an event
        match record.event:
            case on.AttemptStarted():
                self._losses = record.node_losses
            case on.CheckpointCommitted() as event:
                self._counts[declared.CHECKPOINTS, ("committed",)] += 1
                self._add(declared.SAVE_SECONDS, (), max(0.0, event.seconds))
                self._gauges[declared.CHECKPOINT_TIME] = event.at
                self._gauges[declared.CHECKPOINT_BYTES] = event.bytes
                self._gauges[declared.CHECKPOINT_SECONDS] = event.seconds
            case on.SaveFailed():
                self._counts[declared.CHECKPOINTS, ("failed",)] += 1
            case on.NodeFaulted() as event:
                self._counts[declared.NODE_FAULTS, ("yes" if event.leave else "no",)] += 1
            case on.Judged() as event:
                self._counts[declared.LAUNCH_FAILURES, (event.cause.value,)] += 1
            case on.Suspended() as event:
                self._add(declared.SUSPENDED_SECONDS, (), max(0.0, event.seconds))
            case on.WatcherLost():
                self._counts[declared.WATCHERS_LOST, ()] += 1
            case on.RequeueAnswered() as event:
                self._counts[declared.REQUEUES, ("accepted" if event.ok else "refused",)] += 1
            case on.SlurmAnswered() if before is not Phase.REQUEUEING:  # there it is the last look, no news
                match record.reasons[:1]:
                    case (because.SlurmSaid(notice=notice),) if notice in _NOTICES:
                        self._counts[declared.NOTICES, (_NOTICES[notice],)] += 1
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
                key = (declared.PHASE_SECONDS, (self._phase.value,))
                seconds[key] += max(0.0, now - self._phase_since)
        found += [Sample(metric, value, labels) for (metric, labels), value in seconds.items()]
        found += [Sample(metric, value) for metric, value in gauges.items()]
        return [*found, *_of_status(status, version)]


def _of_status(status: Status, version: str) -> Iterator[Sample]:
    yield Sample(declared.INFO, 1, (version,))
    for phase in Phase:
        yield Sample(declared.PHASE, float(phase.value == status.phase), (phase.value,))
    values = {
        declared.UPDATED: status.updated_at,
        declared.STARTED: status.started_at,
        declared.ATTEMPT: status.attempt,
        declared.LAUNCH: status.launch,
        declared.NODES: len(status.nodes),
        declared.STEP: status.step,
        declared.TOKENS: status.tokens,
        declared.LOSS: status.loss,
        declared.STEP_SECONDS: status.step_seconds,
        declared.CHECKPOINT_STEP: status.checkpoint_step,
        declared.EXIT_CODE: status.exit_code,
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
