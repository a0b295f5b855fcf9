"""One model of what happened in a run: `build` joins journal, rows and step directories.  Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from typing import NamedTuple

import msgspec

from stepkeeper.core.exits import ExitCode
from stepkeeper.run_analytics import spending
from stepkeeper.run_analytics.history import History
from stepkeeper.run_analytics.model import (
    Accounts,
    Attempt,
    Checkpoint,
    Ending,
    Incident,
    Key,
    Launch,
    Rows,
    Span,
    micro,
    patience,
)
from stepkeeper_trainer.formats.lineage import PINNED, PRUNED, SUSPECT, Lineage
from stepkeeper_trainer.formats.manifest import parse_step_name
from stepkeeper_trainer.formats.steps import COMMITTED, DAMAGED, VERIFIED


class RunState(StrEnum):
    """How it stands with the run."""

    RUNNING = "running"
    WAITING = "waiting"  # requeued: the next attempt has not started
    SILENT = "silent"  # it neither ended nor says anything
    FINISHED = "finished"
    ENDED = "ended"
    EMPTY = "empty"


class Timeline(msgspec.Struct, frozen=True, kw_only=True):
    """What happened in a run.  Instants are microseconds."""

    run_state: RunState
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
    why: str = ""  # the newest record of how it ended, or what it waits for

    def launches(self) -> Iterator[Launch]:
        """Yield the launches of all attempts."""
        for attempt in self.attempts:
            yield from attempt.launches

    @property
    def exit_code(self) -> int | None:
        """How the newest attempt ended; None where it runs, or ended without a final record."""
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
            rows = self.rows.get(launch.key)
            if not rows:
                continue
            if best is not None:
                lost += max(0, best - (rows.step[0] - 1))
            best = rows.step[-1]
        return lost


def build(
    said: History,
    rows: dict[Key, Rows],
    checkpoints: Sequence[Checkpoint] = (),
    *,
    updated_at: int | None = None,
    now: int | None = None,
) -> Timeline:
    """Make the timeline.

    Args:
        said: what the journal holds.
        rows: the steps of each launch, from `metrics.csv`.
        checkpoints: the step directories.
        updated_at: when the supervisor last wrote its status.
        now: to distinguish a silent run from a running one; nothing else depends on it.
    """
    coarse = not rows and bool(said.progress)
    rows = rows or said.progress
    attempts = said.attempts
    _hear_rows(attempts, rows)
    until = max((attempt.ended for attempt in attempts), default=0)
    newest = attempts[-1] if attempts else None
    if newest is not None and not newest.said_end and updated_at is not None:
        until = newest.ended = max(until, updated_at)
    run_state = _run_state(newest, rows, until, now)
    _close(attempts, run_state)
    ends = spending.Ends(
        until=until,
        over=run_state is RunState.ENDED,
        finished=run_state is RunState.FINISHED,
        durable_step=_durable(attempts),
    )
    limits = spending.kept_until(attempts, rows, ends)
    spans = spending.spans(attempts, rows, ends, limits)
    last = _newest_rows(attempts, rows)
    return Timeline(
        run_state=run_state,
        began=spans[0].begin if spans else until,
        until=spans[-1].end if spans else until,
        attempts=attempts,
        spans=spans,
        accounts=spending.accounts(spans),
        incidents=said.incidents.found,
        incidents_left_out=said.incidents.left_out,
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
    """A row is a sign of life of its launch: an attempt that was killed lived at least until then."""
    for index, attempt in enumerate(attempts):
        limit = attempts[index + 1].began if index + 1 < len(attempts) else None
        for launch in attempt.launches:
            known = rows.get(launch.key)
            if not known:
                continue
            launch.last_step = known.step[-1]
            if not attempt.said_end:
                last = known.at[-1]
                attempt.ended = max(attempt.ended, last if limit is None else min(last, limit))


def _run_state(newest: Attempt | None, rows: dict[Key, Rows], until: int, now: int | None) -> RunState:
    if newest is None:
        return RunState.EMPTY
    if newest.said_end:
        if newest.exit_code == ExitCode.FINISHED:
            return RunState.FINISHED
        requeued = newest.exit_code in (ExitCode.REQUEUED, ExitCode.SUPERSEDED)
        return RunState.WAITING if requeued else RunState.ENDED
    if now is None:
        return RunState.RUNNING
    last = _newest_rows([newest], rows)
    return RunState.SILENT if now - until > patience(last.median_step() if last else 0) else RunState.RUNNING


def _close(attempts: Sequence[Attempt], run_state: RunState) -> None:
    """Mark launches whose end no supervisor recorded."""
    for index, attempt in enumerate(attempts):
        for position, launch in enumerate(attempt.launches):
            newest = index + 1 == len(attempts) and position + 1 == len(attempt.launches)
            if launch.ending is Ending.RUNNING and not (newest and run_state is RunState.RUNNING):
                launch.ending = Ending.NO_UPDATE
                launch.why = launch.why or "the supervisor was killed or its node lost: no end is recorded"


def _durable(attempts: Sequence[Attempt]) -> int:
    """Return the newest step that a next launch would start from."""
    for attempt in reversed(attempts):
        for launch in reversed(attempt.launches):
            committed = [save.step for save in launch.saves if save.directory]
            if committed or not launch.in_memory:
                return committed[-1] if committed else launch.resumed_step
    return 0


def _newest_rows(attempts: Sequence[Attempt], rows: dict[Key, Rows]) -> Rows | None:
    for attempt in reversed(attempts):
        for launch in reversed(attempt.launches):
            if known := rows.get(launch.key):
                return known
    return None


# The state of each step directory, from the journal, the lineage and what is on disk.  Pure.

CLOCKS_DIFFER_S = 5.0  # at most, those of the storage and of the supervisor's host
MARKS = (PINNED, SUSPECT, PRUNED)


class OnDisk(NamedTuple):
    """One step directory that is there now."""

    step: int
    save_id: str = ""  # empty: no readable manifest
    problem: str = ""
    verified: bool = False  # every byte was compared, and no file has changed since, by the cache of verifications
    changed_at: float = 0.0  # Unix seconds: the newest change of its files


def checkpoints(said: History, lineage: Lineage | None, disk: Mapping[str, OnDisk] | None) -> list[Checkpoint]:
    """Return every step directory that anything names, oldest step first.

    Args:
        said: the journal.
        lineage: of the run, if there is one.
        disk: by name, what is there; None where nobody looked.
    """
    all_saves = (save for attempt in said.attempts for launch in attempt.launches for save in launch.saves)
    saves = {save.directory: save for save in all_saves if save.directory}
    commits = {commit.directory: commit for commit in lineage.commits.values()} if lineage is not None else {}
    names = dict.fromkeys((*saves, *commits, *said.verified, *(disk or ())))
    chain = set(lineage.chain()) if lineage is not None and lineage.has_steps else None
    found = []
    for name in names:
        save, commit, there = saves.get(name), commits.get(name), (disk or {}).get(name)
        named = save or commit or there
        step = named.step if named is not None else parse_step_name(name)
        if step is None:
            continue
        save_id = commit.save_id if commit is not None else there.save_id if there is not None else ""
        marks = lineage.marks.get(save_id, frozenset()) if lineage is not None else frozenset()
        problem, verified = judged(name, said, there)
        states = [condition(problem, verified=verified)]
        states += [mark for mark in MARKS if mark in marks]
        if disk is not None and there is None and PRUNED not in marks:
            states.append("gone")
        if chain is not None and commit is not None and save_id not in chain:
            states.append("rolled back")
        at = save.durable if save is not None else micro(commit.at) if commit is not None else None
        found.append(
            Checkpoint(
                step=step,
                directory=name,
                at=at,
                bytes=save.bytes if save is not None else 0,
                seconds=(save.durable - save.requested) / 1e6 if save is not None else 0.0,
                emergency=save.emergency if save is not None else False,
                states=tuple(states),
                problem=problem,
                resumed=said.chosen.get(name, 0),
            )
        )
    return sorted(found, key=lambda each: (each.step, each.at or 0, each.directory))


def judged(name: str, said: History, there: OnDisk | None) -> tuple[str, bool]:
    """Return what is wrong with a step directory, and whether it is known that nothing is.

    The journal's newest record counts for the files that it spoke of: not for those that were written to since.
    """
    word = said.verified.get(name)
    if there is None:
        return word or "", word is not None
    if there.changed_at > said.verified_at.get(name, 0.0) + CLOCKS_DIFFER_S:
        word = None
    if there.verified or there.problem:
        return there.problem, not there.problem
    return word or "", word is not None


def condition(problem: str, *, verified: bool) -> str:
    """Return one of the three words for a step directory.

    >>> condition("", verified=False)
    'committed, not yet verified'
    """
    return DAMAGED if problem else VERIFIED if verified else COMMITTED


def in_words(state: str, *, is_over: bool) -> str:
    """Return the state of a checkpoint for people: after the end of a run, no supervisor verifies one.

    >>> in_words("committed, not yet verified", is_over=True)
    'committed, not verified'
    """
    return "committed, not verified" if is_over and state == COMMITTED else state
