"""This process did not run for a while, or its wall clock was set.  Pure.

Suspended, or on a batch host that stood still: the ranks stood still too, or could not be heard.  Nothing that was
waited for is late by that time.  Slurm's own instants stay as they are: it is asked before one of them counts.
"""

from __future__ import annotations

import msgspec

from stepkeeper.core import events as on
from stepkeeper.core import reasons as because
from stepkeeper.core.limit import expecting
from stepkeeper.core.phases import Decision, query_slurm_unprompted
from stepkeeper.core.policy import Policy
from stepkeeper.core.state import Phase, State, Suspended

SPANS = 0.5  # of the time that we were away: ranks are stopped a little later than we are

replace = msgspec.structs.replace


def on_stood_still(state: State, event: on.Suspended) -> Decision:
    """Put off everything that is measured in silence; an answer that is on its way may be out of date."""
    away = event.seconds
    why = (because.Suspended(seconds=away),)
    deadline = _later(state.deadline_at, away)
    if state.leave_at is not None and state.deadline_at is not None:  # Slurm's limit is not ours to put off
        deadline = min(state.deadline_at + away, max(state.deadline_at, state.leave_at))
    failure = state.failure
    if failure is not None:
        failure = replace(failure, judge_by=failure.judge_by + away)
    seen = state.suspended
    suspended = Suspended(
        step=away if state.phase in (Phase.TRAINING, Phase.SAVING) else 0.0,
        save=seen.save + away if state.saving is not None else 0.0,
        asked=state.asking,
    )
    state = replace(
        state,
        deadline_at=deadline,
        hang_at=_later(state.hang_at, away),
        wait_until=_later(state.wait_until, away),
        launched_at=_later(state.launched_at, away),
        unfit_since=_later(state.unfit_since, away),
        storage_since=_later(state.storage_since, away),
        slurm_away_since=_later(state.slurm_away_since, away),
        growth=replace(state.growth, look_until=_later(state.growth.look_until, away)),
        failure=failure,
        suspended=suspended,
    )
    return Decision(state, (), why)


def on_clock_set(state: State, event: on.ClockSet, policy: Policy) -> Decision:
    """Our own instants stay as they are; those that Slurm has told stand elsewhere among them now."""
    why = (because.ClockSet(seconds=event.seconds),)
    state = replace(
        state, end_at=_later(state.end_at, -event.seconds), preempted_at=_later(state.preempted_at, -event.seconds)
    )
    if state.limit_at is not None:  # else Slurm is being asked about it, or was
        state = expecting(state, policy)
    if state.phase is Phase.SAVING and state.leave_at is not None:  # by when was said by the clock before
        return query_slurm_unprompted(state, (*why, because.SaveLimitAsked()))
    return Decision(state, (), why)


def _later(at: float | None, seconds: float) -> float | None:
    return None if at is None else at + seconds


def step_seconds(state: State, seconds: float | None) -> tuple[State, float | None]:
    """Return how long a step took for the run's pace: None for the one that was suspended."""
    away = state.suspended.step
    if seconds is None or not away or seconds < SPANS * away:
        return state, seconds
    return replace(state, suspended=replace(state.suspended, step=0.0)), None


def save_seconds(state: State, seconds: float) -> tuple[State, float]:
    """Return how long a save took while the job ran."""
    away = state.suspended.save
    return replace(state, suspended=replace(state.suspended, save=0.0)), max(0.0, seconds - away)
