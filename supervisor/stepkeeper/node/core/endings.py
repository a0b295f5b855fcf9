"""How a drain that we hold ends, and what becomes of the faults that asked for it.  Pure.

By the checks' word, by the breaker, or by somebody else.  A return of ours whose answer was lost is still ours: the
faults stay open.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from stepkeeper.node.core import effects as do
from stepkeeper.node.core.incidents import put
from stepkeeper.node.core.plan import Decision, look_again_at
from stepkeeper.node.core.policy import Policy
from stepkeeper.node.core.state import Drain, Incident, Outcome, State
from stepkeeper.slurm.nodes import NodeFacts

replace = msgspec.structs.replace


def close(state: State, incidents: Iterable[Incident], outcome: Outcome, why: str) -> Decision:
    """Close incidents without a drain, and say it loudly, once."""
    effects: tuple[do.Effect, ...] = ()
    for before in incidents:
        incident = replace(before, outcome=outcome, outcome_why=why)
        state = put(state, incident)
        effects += (do.Record(incident=incident),)
        if before.outcome_why != why:
            effects += (do.Alarm(text=why, incident=incident.id),)
    return Decision(state, effects, why)


def watching(state: State, at: float, policy: Policy, *, refused: bool) -> State:
    """Return the state in which Slurm is asked about the node again, later; `refused`: by the breaker."""
    if state.drain is not None:
        return state
    return replace(state, watch_at=look_again_at(state, at, policy, refused=refused))


def held(state: State) -> list[Incident]:
    """Return the faults that our drain is for."""
    return [each for each in state.incidents if each.outcome is Outcome.DRAINED]


def lost(state: State, at: float, own: NodeFacts, policy: Policy) -> Decision:
    """Let go of a drain that is gone: our own return took it away, or somebody else did, or took it over."""
    drain = state.drain
    assert drain is not None, "a drain that we hold"
    if drain.resume_sent and not own.drained:
        return _returned_late(state, at, drain, policy)
    if own.drained:
        outcome, why = Outcome.FOREIGN, f"the drain is somebody else's now: {own.reason}"
    else:
        outcome, why = Outcome.RESOLVED, "somebody else returned the node to service"
    state, effects = _let_go(state, outcome, why, returned=True)
    return Decision(state, effects, why)


def _let_go(state: State, outcome: Outcome, why: str, *, returned: bool = False) -> tuple[State, tuple[do.Effect, ...]]:
    """Note that we hold no drain any more, and last of all: who is killed in between still knows of the drain."""
    effects: tuple[do.Effect, ...] = ()
    for incident in held(state):
        incident = replace(incident, outcome=outcome, outcome_why=why, returned=returned)  # noqa: PLW2901
        state = put(state, incident)
        effects += (do.Record(incident=incident),)
    return replace(state, drain=None), (*effects, do.RecordDrain(drain=None))


def _returned_late(state: State, at: float, drain: Drain, policy: Policy) -> Decision:
    """Take up that the node is in service by our own word, whose answer was lost: what asked for the drain stands."""
    if drain.passed:
        return returned_by_us(state)
    if not drain.counted:
        return taken_back(watching(replace(state, drain=None), at, policy, refused=True))
    why = "our own return, whose answer was lost, took effect late: the agent drains the node again"
    state, effects = _let_go(state, Outcome.OPEN, why)
    return Decision(state, effects, why)


def taken_back(state: State) -> Decision:
    """Note that the breaker had us give the drain back."""
    why = f"circuit breaker: {state.call_reason or 'too many drains'}; look for a common cause"
    ended = close(state, held(state), Outcome.TAKEN_BACK, why)
    return Decision(ended.state, (*ended.effects, do.RecordDrain(drain=None)), why)


def returned_by_us(state: State) -> Decision:
    """Note that the node is in service by its checks."""
    state, effects = _let_go(state, Outcome.RESOLVED, "the node passed its checks and was returned to service")
    return Decision(state, effects, "the node is in service again")
