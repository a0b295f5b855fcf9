"""Training that falls silent: look at the ranks' stacks, and end it only where none of them moves.  Pure.

Never judged by a fixed time, and never by silence alone: an evaluation that does not `poll` is silent too.
"""

from __future__ import annotations

import msgspec

from stepkeeper.core import effects as do
from stepkeeper.core import events as on
from stepkeeper.core.causes import Cause, Finding
from stepkeeper.core.pace import silence_s
from stepkeeper.core.phases import Decision, all_ready, kill
from stepkeeper.core.policy import Policy
from stepkeeper.core.state import Next, Phase, Plan, State

RULE = "progress-silence"
PATIENCE_MAX = 8.0  # times the usual limit, for ranks that move and complete no step

replace = msgspec.structs.replace


def alive(state: State, at: float, policy: Policy) -> State:
    """A rank spoke: from here on silence counts anew."""
    if not policy.hang_watch:
        return replace(state, hang_at=None)
    allowed = silence_s(state.pace, policy, saving=state.saving is not None)
    return replace(state, looking=False, patience=1.0, hang_at=at + allowed)


def on_silence(state: State, at: float, policy: Policy) -> Decision:
    """No word for longer than is usual: have the ranks' stacks collected, twice."""
    if state.looking:
        return _stands_still(state, at, "no stacks came in time", None, policy)
    if not all_ready(state):  # words may be lost with the watchers, whose deadline runs
        return Decision(_wait_on(state, at, policy))
    state = replace(state, looking=True, hang_at=at + policy.stacks_within_s)
    why = f"no step since {_since(state)}: the ranks' stacks are looked at"
    effect = do.CollectStacks(launch=state.launch, nodes=state.launched, within_s=0.8 * policy.stacks_within_s)
    return Decision(state, (effect,), why)


def on_stacks(state: State, event: on.StacksCollected, policy: Policy) -> Decision:
    """The ranks move, so they only take long; or they stand still, and nothing but an end helps."""
    if event.launch != state.launch or not state.looking or state.phase is not Phase.TRAINING:
        return Decision(state)
    if event.moved:
        state = _wait_on(replace(state, looking=False, patience=2 * state.patience), event.at, policy)
        return Decision(state, (), f"the ranks take long, and still move: {event.summary}")
    return _stands_still(state, event.at, event.summary, event, policy)


def _since(state: State) -> str:
    return f"step {state.step}" if state.step is not None else "the launch began"


def _wait_on(state: State, at: float, policy: Policy) -> State:
    allowed = silence_s(state.pace, policy, saving=state.saving is not None)
    return replace(state, hang_at=at + min(state.patience, PATIENCE_MAX) * allowed)


def _stands_still(state: State, at: float, summary: str, said: on.StacksCollected | None, policy: Policy) -> Decision:
    why = f"the training stands still since {_since(state)}: {summary}"
    found = Finding(
        cause=Cause.HANG,
        rule=RULE,
        text=why,
        node=said.node if said is not None else "",
        rank=said.rank if said is not None else None,
        step=state.step,
    )
    plan = Plan(next=Next.RELAUNCH, why=why)
    state = replace(state, phase=Phase.STOPPING, plan=plan, first_failure=why, found=found, looking=False)
    return kill(state, at, policy, why)
