"""Journal records -> attempts, launches and saves.  Pure; one pass, and small whatever the journal's size."""

from __future__ import annotations

import math
from collections.abc import Iterable

import msgspec

from stepkeeper.core import effects as do
from stepkeeper.core import events as on
from stepkeeper.core.reason_text import tag, text
from stepkeeper.core.state import Phase
from stepkeeper.seeing import endings
from stepkeeper.seeing.incidents import Incidents, name_of
from stepkeeper.seeing.model import Attempt, Ending, Launch, Saved, micro
from stepkeeper.seeing.rows import Key, Rows
from stepkeeper.store.journal import Record


class History(msgspec.Struct, kw_only=True):
    """What a journal tells, before the rows of the steps are known."""

    attempts: list[Attempt] = msgspec.field(default_factory=list)
    incidents: Incidents = msgspec.field(default_factory=Incidents)
    progress: dict[Key, Rows] = msgspec.field(default_factory=dict)  # coarse, for launches without rows
    verified: dict[str, str] = msgspec.field(default_factory=dict)  # directory -> problem; empty: it is verified
    verified_at: dict[str, float] = msgspec.field(default_factory=dict)  # when that was found out
    chosen: dict[str, int] = msgspec.field(default_factory=dict)  # directory -> launches that started from it
    records: int = 0


def read_history(records: Iterable[Record]) -> History:
    """Read the records, oldest first; those of a superseded attempt may stand between the newer one's."""
    teller = _Teller()
    for record in records:
        teller.take(record)
    return teller.told()


class _Teller:
    def __init__(self) -> None:
        self.open: dict[tuple[int, int, int], Attempt] = {}
        self.resume: dict[tuple[int, int, int], tuple[int, str]] = {}  # for the launch to come
        self.saving: dict[Key, int] = {}  # since when
        self.seen = History()

    def told(self) -> History:
        self.seen.attempts = sorted(self.open.values(), key=lambda each: each.began)
        return self.seen

    def take(self, record: Record) -> None:
        self.seen.records += 1
        key = (record.attempt, record.job_id, record.restart_count)
        at = micro(record.event.at)
        attempt = self.open.get(key)
        if attempt is None:
            attempt = Attempt(
                number=record.attempt, job_id=record.job_id, restart_count=record.restart_count, began=at, ended=at
            )
            self.open[key] = attempt
        at = attempt.ended = max(attempt.ended, at)
        if attempt.said_end:
            return  # nothing counts after its last word
        self._notice_nodes(attempt, record, at)
        self._follow(attempt, record, at)
        self._phases(attempt, record, at)
        self._stand_still(attempt, record, at)
        self._resume(key, record)
        self._launches(key, attempt, record, at)
        self.seen.incidents.take(record, at, attempt.launches[-1].number if attempt.launches else None)
        for effect in record.effects:
            if isinstance(effect, do.Exit):
                attempt.said_end, attempt.exit_code, attempt.why = True, effect.code, text(effect.reasons)
        if record.phase is Phase.DONE and not attempt.said_end:
            attempt.said_end, attempt.why = True, record.why

    # --- nodes and phases -------------------------------------------------------------------------

    def _notice_nodes(self, attempt: Attempt, record: Record, at: int) -> None:
        if isinstance(record.event, on.AttemptStarted):
            attempt.nodes = record.event.nodes
            attempt.gpus_per_node = record.event.gpus_per_node or 0
        nodes = record.nodes or (record.event.nodes if isinstance(record.event, on.AttemptStarted) else ())
        if not nodes:
            return
        if not attempt.held or attempt.held[-1][1] != len(nodes):
            attempt.held.append((at, len(nodes)))
            for node in set(attempt.nodes) - set(nodes):
                attempt.left.setdefault(node, at)

    def _phases(self, attempt: Attempt, record: Record, at: int) -> None:
        if not attempt.phases or attempt.phases[-1][1] != record.phase.value:
            attempt.phases.append((at, record.phase.value))

    def _stand_still(self, attempt: Attempt, record: Record, at: int) -> None:
        if isinstance(record.event, on.Suspended):
            free = max(attempt.began, attempt.still[-1][1] if attempt.still else attempt.began)
            since = max(free, at - max(0, micro(record.event.seconds)))
            if since < at:
                attempt.still.append((since, at))

    # --- launches ---------------------------------------------------------------------------------

    def _resume(self, key: tuple[int, int, int], record: Record) -> None:
        event = record.event
        if isinstance(event, on.CheckpointChosen):
            self.resume[key] = (event.step or 0, event.directory or "")
            if event.directory:
                self._found_out(event.directory, "", event.at)
            for skipped in event.skipped:
                self._found_out(skipped.directory, skipped.problem, event.at)
        if isinstance(event, on.CheckpointVerified):
            self._found_out(event.directory, "" if event.ok else event.problem or "damaged", event.at)

    def _found_out(self, directory: str, problem: str, at: float) -> None:
        self.seen.verified[name_of(directory)] = problem
        self.seen.verified_at[name_of(directory)] = at

    def _launches(self, key: tuple[int, int, int], attempt: Attempt, record: Record, at: int) -> None:
        for effect in record.effects:
            if isinstance(effect, do.StartLaunch):
                step, directory = self.resume.get(key, (0, ""))
                if directory:
                    self.seen.chosen[name_of(directory)] = self.seen.chosen.get(name_of(directory), 0) + 1
                attempt.launches.append(
                    Launch(
                        attempt=attempt.number,
                        number=effect.launch,
                        began=at,
                        nodes=effect.nodes or record.nodes or attempt.nodes,
                        resumed_step=step,
                        resumed_from=name_of(directory),
                        phases=[(at, Phase.TRAINING.value)],
                    )
                )

    def _follow(self, attempt: Attempt, record: Record, at: int) -> None:
        """Let the newest launch of the attempt know what happened."""
        launch = attempt.launches[-1] if attempt.launches else None
        if launch is None:
            return
        if launch.ended is None and launch.phases[-1][1] != record.phase.value:
            launch.phases.append((at, record.phase.value))
        self._end(launch, record)
        event = record.event
        if getattr(event, "launch", launch.number) != launch.number:
            return  # a late word of an earlier one
        match event:
            case on.LaunchBegan():
                launch.all_tasks_started = True
            case on.RankHello():
                _greet(launch, event)
            case on.Progressed():
                rows = self.seen.progress.setdefault((attempt.number, launch.number), Rows())
                rows.add(event.at, event.step, math.inf if event.not_finite else event.loss, event.tokens)
            case on.SaveBegan() | on.CheckpointCommitted() | on.SaveFailed():
                self._save(launch, event, at)
            case on.LaunchEnded() | on.LaunchRefused():
                launch.ended = at if launch.ended is None else launch.ended
            case on.Judged():
                launch.cause, launch.evidence = event.cause.value, event.text
            case _:
                pass  # it says nothing of the launch itself

    def _save(self, launch: Launch, event: on.SaveBegan | on.CheckpointCommitted | on.SaveFailed, at: int) -> None:
        key = (launch.attempt, launch.number)
        began = self.saving.pop(key, at)
        match event:
            case on.SaveBegan():
                self.saving[key] = at
            case on.CheckpointCommitted():
                save = Saved(
                    requested=max(launch.began, at - max(0, micro(event.seconds))),
                    durable=at,
                    step=event.step,
                    directory=name_of(event.directory),
                    bytes=event.bytes,
                    emergency=event.emergency,
                )
                launch.saves.append(save)
            case on.SaveFailed():
                launch.saves.append(Saved(requested=began, durable=at, step=event.step, error=event.error))

    def _end(self, launch: Launch, record: Record) -> None:
        """Find out why it ended, and what was decided; what is known later may be stronger."""
        endings.decide(launch, record)
        found = endings.ending(record, launch)
        if found is not None and endings.outweighs(found, launch.ending):
            known_better = found in (Ending.HANG, Ending.LOSS) and launch.why
            launch.ending = found
            if record.reasons and not known_better:
                launch.why, launch.reason = record.why, tag(record.reasons)
            endings.decide(launch, record)


def _greet(launch: Launch, event: on.RankHello) -> None:
    """A rank speaks; what it resumed from counts, where a tier had something newer."""
    launch.heard = launch.all_tasks_started = True
    if event.resumed_step is not None and event.resumed_step != launch.resumed_step:
        launch.resumed_step, launch.resumed_from = event.resumed_step, ""
