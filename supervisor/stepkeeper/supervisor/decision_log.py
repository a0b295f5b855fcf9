"""What is recorded of each decision: in the log for people, in the status for readers, in the journal for good."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import assert_never

import msgspec

from stepkeeper.core import effects as do
from stepkeeper.core import events as on
from stepkeeper.core.phases import Decision
from stepkeeper.core.state import State
from stepkeeper.log import Log
from stepkeeper.loop_tools import reraise
from stepkeeper.reason_text import tag, text
from stepkeeper.run_store import status as status_file
from stepkeeper.run_store.journal import JournalWriter
from stepkeeper.run_store.lines import NewestWriter
from stepkeeper.run_store.recorder import Recorder

STATUS_EVERY_S = 2.0
PROGRESS_EVERY_S = 10.0  # at most one line

Report = do.ReportSlowNode | do.ReportSlowLaunch | do.ReportReplay


class DecisionLog:
    """Of one attempt.  Nothing here waits for storage: journal and status have threads of their own."""

    def __init__(
        self,
        *,
        status: status_file.Status,
        status_path: Path,
        recorder: Recorder,
        journal: JournalWriter,
        to_wall: Callable[[float], float],
        log: Log,
    ) -> None:
        """Begin with a status, whose instants others compare with the wall clock: `to_wall` makes them of ours."""
        self._to_wall = to_wall
        self.status = status
        self._recorder, self._journal, self._log = recorder, journal, log
        self._progress_at = 0.0  # when the next progress is logged
        self._fenced = False  # a newer attempt writes the status
        self._journal_failed = ""
        self._status_writer = NewestWriter(
            status_path,
            every_s=STATUS_EVERY_S,
            on_error=lambda error: log.warning("status_not_written", error=str(error)),
            on_failure=reraise,
        )

    def decided(self, before: State, event: on.Event, decision: Decision) -> None:
        """Tell of one event.  Progress is coalesced; what changed nothing is not logged."""
        state = decision.state
        changes = status_file.changes(self.status, event, before, state)
        if isinstance(event, on.Progressed) and event.at >= self._progress_at:
            self._progress_at = event.at + PROGRESS_EVERY_S
            self._log.info("progress", step=event.step, loss=event.loss, step_seconds=event.step_seconds)
        if decision.why:
            why = text(decision.why)
            changes |= {"why": why, "reason": tag(decision.why)}
            phase = {"phase": state.phase.value}
            if state.phase is not before.phase:
                phase = {"phase": f"{before.phase.value} -> {state.phase.value}"}
            effects = [effect.__struct_config__.tag for effect in decision.effects]
            self._log.info("decision", why=why, reason=tag(decision.why), **phase, effects=effects)
        self.status = msgspec.structs.replace(self.status, **changes, updated_at=self._to_wall(event.at))
        self._fenced = self._fenced or isinstance(event, on.Superseded)
        if not self._fenced:  # else the file is the newer attempt's
            self._status_writer.show(self.status)

    def journal(self, before: State, event: on.Event, decision: Decision) -> None:
        """Keep what the next attempt and the report need to know of one event."""
        record = self._recorder.record(before, event, decision)
        if record is not None:
            self._journal.append(record)

    def alive(self, now: float) -> None:
        """Let the status say that the supervisor runs, also while nothing happens."""
        self.status = msgspec.structs.replace(self.status, alive_at=self._to_wall(now))
        if not self._fenced:
            self._status_writer.show(self.status)

    def found(self, effect: Report) -> None:
        """Tell of what the rules noticed."""
        match effect:
            case do.ReportSlowNode() if effect.over:
                self._log.info("node_keeps_up", node=effect.node)
            case do.ReportSlowNode() if effect.loading:
                slow = {"factor": effect.factor, "since": effect.since}
                self._log.warning("loader_is_slow", node=effect.node, rank=effect.rank, **slow)
            case do.ReportSlowNode():
                self._log.warning("node_is_slow", node=effect.node, factor=effect.factor, since=effect.since)
            case do.ReportSlowLaunch():
                nodes = ",".join(effect.nodes)
                self._log.warning("launch_is_slow", seconds=effect.seconds, baseline=effect.baseline, suspects=nodes)
            case do.ReportReplay() if effect.equal:
                self._log.info("replay_equal", steps=effect.steps)
            case do.ReportReplay():
                nodes = ",".join(effect.nodes)
                self._log.warning("replay_differs", step=effect.step, then=effect.then, now=effect.now, new_nodes=nodes)
            case _:
                assert_never(effect)

    def ended(self, effect: do.Exit) -> None:
        """Tell how the supervisor ends."""
        self.status = msgspec.structs.replace(self.status, exit_code=effect.code)
        self._log.info("exit", code=effect.code, reason=text(effect.reasons))

    def look_at_journal(self) -> None:
        """Tell where the run directory does not take the journal, and when it does again."""
        failed = self._journal.failed
        if failed == self._journal_failed:
            return
        self._journal_failed = failed
        self._log.warning("journal_not_written", error=failed) if failed else self._log.info("journal_written_again")

    def flush(self, within_s: float) -> bool:
        """Have the journal durable; false, and logged, if that takes longer or fails."""
        durable = self._journal.flush(within_s)
        if not durable:
            self._log.warning("journal_late", error=self._journal.failed or "the storage does not answer")
        return durable

    def close(self, within_s: float) -> None:
        """Write the last status, and what the journal has not written yet, if the storage takes it in time."""
        if not self._fenced:
            self._status_writer.close(self.status, within_s)
        self._journal.flush(within_s)
