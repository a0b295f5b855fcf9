"""The job's time limit, ahead of it and without a signal: when to leave so that a save is durable before it.  Pure."""

from __future__ import annotations

import msgspec

from stepkeeper.core import reasons as because
from stepkeeper.core.phases import Decision, query_slurm
from stepkeeper.core.policy import Policy
from stepkeeper.core.state import LIMIT, State

LEAST_S = 60.0  # of the margin, where nobody has set one
SAVES = 3.0  # times the longest save of the run
SHARE_MOST = 0.2  # of the attempt's whole time

replace = msgspec.structs.replace


def margin_s(state: State, policy: Policy) -> float:
    """Return how long before the time limit the job leaves: as set, else by how long the run's saves take."""
    if policy.time_limit_margin:
        return policy.time_limit_margin
    whole = max(0.0, (state.end_at or 0.0) - (state.started_at or 0.0))
    return min(SHARE_MOST * whole, max(LEAST_S, SAVES * state.pace.save + policy.save_margin_s))


def expecting(state: State, policy: Policy) -> State:
    """Set when to ask Slurm about the limit: it may have been changed since."""
    return replace(state, limit_at=None if state.end_at is None else state.end_at - margin_s(state, policy))


def on_limit_near(state: State) -> Decision:
    """The margin has begun, as far as we know: is it still so?"""
    state = replace(state, limit_at=None, signal=state.signal if state.asking else LIMIT)
    return query_slurm(state, (because.TimeLimitNear(),))
