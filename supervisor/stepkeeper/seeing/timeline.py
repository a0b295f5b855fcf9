"""One model of what happened in a run: `build` joins journal, rows and step directories.  Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from enum import StrEnum

import msgspec

from stepkeeper.core.exits import ExitCode
from stepkeeper.seeing import spending
from stepkeeper.seeing.history import History
from stepkeeper.seeing.model import Accounts, Attempt, Checkpoint, Ending, Incident, Launch, Span, patience
from stepkeeper.seeing.rows import Key, Rows


class Standing(StrEnum):
    """How it stands with the run."""

    RUNNING = "running"
    WAITING = "waiting"  # requeued: the next attempt has not started
    SILENT = "silent"  # it neither ended nor says anything
    FINISHED = "finished"
    ENDED = "ended"
    EMPTY = "empty"


class Timeline(msgspec.Struct, frozen=True, kw_only=True):
    """What happened in a run.  Instants are microseconds."""

    standing: Standing
    began: int
    until: int
    attempts: list[Attempt]
    spans: list[Span]
    accounts: Accounts
    incidents: list[Incident]
    incidents_left_out: int
    checkpoints: list[Checkpoint]
    rows: dict[Key, Rows]
    kept_until: dict[Key, int | None]  # the last step of each launch that counts; None: all do
    coarse: bool  # steps are known from the journal only: about one a minute
    step: int | None = None  # newest of the current state
    tokens: int | None = None
    loss: float | None = None
    loss_not_finite: bool = False  # the newest one is no finite number
    rate: float | None = None  # the newest learning rate
    why: str = ""  # the newest word on how it ended, or what it waits for

    def launches(self) -> Iterator[Launch]:
        """Yield the launches of all attempts."""
        for attempt in self.attempts:
            yield from attempt.launches

    @property
    def exit_code(self) -> int | None:
        """How the newest attempt ended; None where it runs, or ended without a word."""
        return self.attempts[-1].exit_code if self.attempts else None

    @property
    def gpus_per_node(self) -> int:
        """GPUs of a node, where all attempts had as many; else 0."""
        found = {attempt.gpus_per_node for attempt in self.attempts}
        return found.pop() if len(found) == 1 else 0

    @property
    def steps_lost(self) -> int:
        """Steps that were completed and had to be done again."""
        best: int | None = None
        lost = 0
        for launch in self.launches():
            rows = self.rows.get((launch.attempt, launch.number))
            if not rows:
                continue
            if best is not None:
                lost += max(0, best - (rows.step[0] - 1))
            best = rows.step[-1]
        return lost


def build(
    told: History,
    rows: dict[Key, Rows],
    checkpoints: Sequence[Checkpoint] = (),
    *,
    updated_at: int | None = None,
    now: int | None = None,
) -> Timeline:
    """Make the timeline.

    Args:
        told: what the journal tells.
        rows: the steps of each launch, from `metrics.csv`.
        checkpoints: the step directories.
        updated_at: when the supervisor last wrote its status.
        now: to tell a silent run from a running one; nothing else depends on it.
    """
    coarse = not rows and bool(told.progress)
    rows = rows or told.progress
    attempts = told.attempts
    _hear_rows(attempts, rows)
    until = max((attempt.ended for attempt in attempts), default=0)
    newest = attempts[-1] if attempts else None
    if newest is not None and not newest.said_end and updated_at is not None:
        until = newest.ended = max(until, updated_at)
    standing = _standing(newest, rows, until, now)
    _close(attempts, standing)
    ends = spending.Ends(
        until=until,
        over=standing is Standing.ENDED,
        finished=standing is Standing.FINISHED,
        durable_step=_durable(attempts),
    )
    limits = spending.kept_until(attempts, rows, ends)
    spans = spending.spans(attempts, rows, ends, limits)
    last = _newest_rows(attempts, rows)
    return Timeline(
        standing=standing,
        began=spans[0].begin if spans else until,
        until=spans[-1].end if spans else until,
        attempts=attempts,
        spans=spans,
        accounts=spending.accounts(spans),
        incidents=told.incidents.found,
        incidents_left_out=told.incidents.left_out,
        checkpoints=list(checkpoints),
        rows=rows,
        kept_until=limits,
        coarse=coarse,
        step=last.step[-1] if last else None,
        tokens=last.tokens if last else None,
        loss=last.loss[-1] if last and math.isfinite(last.loss[-1]) else None,
        loss_not_finite=math.isinf(last.loss[-1]) if last else False,
        rate=last.rate[-1] if last and math.isfinite(last.rate[-1]) else None,
        why=newest.why if newest is not None else "",
    )


def _hear_rows(attempts: Sequence[Attempt], rows: dict[Key, Rows]) -> None:
    """A row is a word of its launch: an attempt that was killed lived at least until then."""
    for index, attempt in enumerate(attempts):
        limit = attempts[index + 1].began if index + 1 < len(attempts) else None
        for launch in attempt.launches:
            known = rows.get((launch.attempt, launch.number))
            if not known:
                continue
            launch.last_step = known.step[-1]
            if not attempt.said_end:
                heard = known.at[-1]
                attempt.ended = max(attempt.ended, heard if limit is None else min(heard, limit))


def _standing(newest: Attempt | None, rows: dict[Key, Rows], until: int, now: int | None) -> Standing:
    if newest is None:
        return Standing.EMPTY
    if newest.said_end:
        if newest.exit_code == ExitCode.FINISHED:
            return Standing.FINISHED
        requeued = newest.exit_code in (ExitCode.REQUEUED, ExitCode.SUPERSEDED)
        return Standing.WAITING if requeued else Standing.ENDED
    if now is None:
        return Standing.RUNNING
    last = _newest_rows([newest], rows)
    return Standing.SILENT if now - until > patience(last.usual() if last else 0) else Standing.RUNNING


def _close(attempts: Sequence[Attempt], standing: Standing) -> None:
    """Say of launches that nobody saw end that nobody did."""
    for index, attempt in enumerate(attempts):
        for position, launch in enumerate(attempt.launches):
            newest = index + 1 == len(attempts) and position + 1 == len(attempt.launches)
            if launch.ending is Ending.RUNNING and not (newest and standing is Standing.RUNNING):
                launch.ending = Ending.NO_WORD
                launch.why = launch.why or "the supervisor was killed or its node lost: nobody saw it end"


def _durable(attempts: Sequence[Attempt]) -> int:
    """Return the newest step that a next launch would start from."""
    for attempt in reversed(attempts):
        for launch in reversed(attempt.launches):
            committed = [save.step for save in launch.saves if save.directory]
            return committed[-1] if committed else launch.resumed_step
    return 0


def _newest_rows(attempts: Sequence[Attempt], rows: dict[Key, Rows]) -> Rows | None:
    for attempt in reversed(attempts):
        for launch in reversed(attempt.launches):
            if known := rows.get((launch.attempt, launch.number)):
                return known
    return None
