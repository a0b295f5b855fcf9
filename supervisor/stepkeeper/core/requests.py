"""What a person asks of a run that is under way: save now, or save and end.  Pure.

A request comes again until it is answered, so what cannot be done at the moment is simply left for later: through a
requeue it waits for the next attempt.
"""

from __future__ import annotations

import msgspec

from stepkeeper.core import effects as do
from stepkeeper.core import events as on
from stepkeeper.core import reasons as because
from stepkeeper.core.exits import ExitCode
from stepkeeper.core.phases import Decision, can_save, close, closed, end_unsaved, save, stop, take
from stepkeeper.core.policy import Policy
from stepkeeper.core.state import Next, Phase, Plan, State

replace = msgspec.structs.replace


def on_requested(state: State, event: on.Requested, policy: Policy) -> Decision:
    """Somebody asks for a checkpoint, or for the end of the run."""
    if event.name in state.answered:
        return Decision(state)  # the answer is on its way
    decision = _save(state, event) if event.kind == "save" else _stop(state, event, policy)
    if decision is None:
        return Decision(state)
    ok = not any(isinstance(reason, because.SaveRefused) for reason in decision.why)
    answered = replace(decision.state, answered=(*decision.state.answered, event.name)[-ANSWERED_MAX:])
    effects = (do.AnswerRequest(name=event.name, reasons=decision.why, ok=ok), *decision.effects)
    return Decision(answered, effects, decision.why)


ANSWERED_MAX = 16


def _save(state: State, event: on.Requested) -> Decision | None:
    """Ask the ranks; without any that could, it is refused at once: the asker waits for an answer."""
    why = (because.Requested(by=event.by, kind="save"),)
    if state.phase is Phase.SAVING or (state.phase is Phase.TRAINING and state.launch.saving is not None):
        return None  # one is under way; the next one can be asked for then
    if state.phase is not Phase.TRAINING:
        return Decision(state, (), (because.SaveRefused(phase=state.phase.value),))
    if not state.launch.library_seen:
        return Decision(state, (), (because.SaveRefused(),))
    return Decision(state, (do.RequestSave(stop=False, reasons=why),), why)


def _stop(state: State, event: on.Requested, policy: Policy) -> Decision | None:
    why = (because.Requested(by=event.by, kind="stop"),)
    plan = Plan(next=Next.END, why=why, code=ExitCode.STOPPED)
    match state.phase:
        case Phase.TRAINING if can_save(state):
            return save(state, event.at + policy.stop_within_s, plan)
        case Phase.TRAINING:
            return end_unsaved(state, event.at, plan, policy)
        case Phase.SAVING:
            return Decision(take(state, plan), (), why)
        case Phase.STOPPING if state.launch.running:
            return Decision(take(state, plan), (), why)
        case Phase.CLOSING:
            return closed(take(state, plan), event.at, policy, why)
        case Phase.REQUEUEING if state.requeue.requesting:
            return None  # the next attempt gets it
        case Phase.REQUEUEING:
            return close(take(state, plan), event.at, plan, policy)
        case _:
            return stop(state, event.at, plan, policy)
