"""What comes of an answer: Slurm's, the remedies', the checks'.  Pure.

Nobody else's reason is ever overwritten, and only what we drained is returned: a reason with our prefix is not
enough, it must be the one that our ledger holds.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import assert_never

import msgspec

from stepkeeper.node_agent.core import events as on
from stepkeeper.node_agent.core import plan
from stepkeeper.node_agent.core.events import Alarm, Tell
from stepkeeper.node_agent.core.incidents import is_over, on_looked, put
from stepkeeper.node_agent.core.plan import (
    Decision,
    answered,
    call,
    failed,
    fraction,
    is_refused,
    left_alone,
    look_again_at,
    may_return,
    next_watch,
    pending,
    reason_for,
    remedy,
)
from stepkeeper.node_agent.core.state import Call, Drain, Incident, Outcome, Policy, Repair, State
from stepkeeper.node_agent.xid.catalogue import Action
from stepkeeper.slurm.client import NodeFacts

replace = msgspec.structs.replace
IN_USE = frozenset(("ALLOCATED", "MIXED", "COMPLETING"))
MAINTAINED = frozenset(("MAINT", "MAINTENANCE"))
"""A reservation for maintenance covers the node: `scontrol` prints the flag in full, `IDLE+MAINTENANCE+RESERVED`."""
TAKEN = MAINTAINED | {"DOWN", "FAIL", "FAILING", "FUTURE", "POWERED_DOWN", "POWERING_DOWN"}
REBOOTING = frozenset(("REBOOT", "REBOOT_ISSUED", "REBOOT_REQUESTED", "DOWN", "POWERING_UP"))
LISTED_NODE_S = 7e-6
"""So long slurmctld works for each node of a list of all nodes."""
LISTS_SPREAD = 100
"""Were all agents to count, their lists are spread over so many times as long as slurmctld works for them."""
SILENT_AGAIN_S = 30.0
"""A node that stopped responding to Slurm comes back without help: look again then."""


def on_nodes_answered(state: State, event: on.NodesAnswered, policy: Policy) -> Decision:
    """Go on with what Slurm was asked for."""
    if event.call != state.call_number or state.call not in (Call.COUNT, Call.RECOUNT, Call.WATCH):
        return Decision(state)  # of a call that was given up
    own = next((each for each in event.nodes if each.name == state.node), None)
    if event.error or own is None:
        state = replace(state, listened=False)
        return failed(state, event.at, event.error or f"Slurm does not know the node {state.node}", policy)
    kind = state.call
    state = answered(replace(state, listened=False))
    if kind is Call.COUNT:
        return _counted(state, event, own, policy)
    if kind is Call.RECOUNT:
        return _recounted(state, event, own, policy)
    return _watched(state, event, own, policy)


def _counted(state: State, event: on.NodesAnswered, own: NodeFacts, policy: Policy) -> Decision:
    wanted = pending(state)
    if not wanted:
        return Decision(state)
    worst = wanted[0]
    drain = state.drain
    if own.drained and drain is not None and drain.reason == own.reason:
        if drain.action.severity >= worst.action.severity:
            return _drained(state, event.at, wanted, own.reason, policy=policy)
        return _set_drain(state, event.at, wanted, reason_for(worst), policy)  # our own reason, for the worse fault
    if own.drained and _is_for(own, state.incidents):
        return _drained(state, event.at, wanted, own.reason, policy=policy)  # we ended between the drain and its note
    if own.states & TAKEN and _is_silence(own):
        state = replace(state, retry_at=event.at + SILENT_AGAIN_S)
        return Decision(
            state, (), f"Slurm has lost sight of the node ({own.reason or 'down'}): drained when it is back"
        )
    if own.drained or own.states & TAKEN:
        why = f"the node is {'+'.join(sorted(own.states))} already, by somebody else: {own.reason or 'no reason given'}"
        return close(watching(state, event.at, policy, refused=False), wanted, Outcome.FOREIGN, why)
    if event.alone:
        return _listened(state, event, policy)
    if why := plan.breaker_refuses(own, event.nodes, event.at, policy):
        state = watching(state, event.at, policy, refused=True)
        return close(state, wanted, Outcome.REFUSED, f"circuit breaker: {why}; look for a common cause")
    note = own.reason if own.reason and not own.ours else ""
    return _set_drain(state, event.at, wanted, reason_for(worst, note), policy)


def _listened(state: State, event: on.NodesAnswered, policy: Policy) -> Decision:
    """Go on to the count of all nodes: at once, unless Slurm was slow to answer about one."""
    state = replace(state, listened=True)
    if event.took_s < policy.crowded_s:
        return Decision(state)
    longest_s = min(policy.crowd_spread_max_s, policy.crowd_spread * event.took_s)
    if event.cluster_size:  # the node itself may be slow: as many agents as there are nodes are a crowd
        longest_s = min(longest_s, LISTS_SPREAD * LISTED_NODE_S * event.cluster_size**2)
    wait_s = longest_s * fraction(f"{state.node} {event.at}")
    why = f"Slurm took {event.took_s:.1f} s to answer about one node: all nodes are counted in {wait_s:.0f} s"
    return Decision(replace(state, retry_at=event.at + wait_s), (), why)


def _is_silence(own: NodeFacts) -> bool:
    """Return whether Slurm itself took the node down, because the node does not respond."""
    return "DOWN" in own.states and not own.drained and (not own.reason or own.reason.startswith("Not responding"))


def _is_for(own: NodeFacts, incidents: Iterable[Incident]) -> bool:
    """Tell whether the node's reason is one that we gave it, for one of these."""
    return own.ours and any(own.reason.endswith(f"[{each.id}]") for each in incidents)


def _set_drain(state: State, at: float, wanted: list[Incident], reason: str, policy: Policy) -> Decision:
    ids = tuple(each.id for each in wanted)
    state = replace(state, call_incidents=ids, call_reason=reason)
    state, effects = call(state, Call.DRAIN, at, policy)
    return Decision(state, effects, f"drain: {reason}")


def _drained(state: State, at: float, incidents: Iterable[Incident], reason: str, *, policy: Policy) -> Decision:
    """Note that we hold the node."""
    found = [replace(each, outcome=Outcome.DRAINED, outcome_why="the node is drained") for each in incidents]
    state = put(state, *found)
    actions = [each.action for each in found] + ([state.drain.action] if state.drain is not None else [])
    action = max(actions, key=lambda action: action.severity)
    rebooted = action is not Action.DRAIN_RMA and all(each.boot_id != state.boot_id for each in held(state))
    drain = Drain(
        reason=reason,
        action=action,
        at=at,
        boot_id=state.boot_id,
        # a repair before this fault has not helped; a reboot after it may have, and the checks will show
        repair=Repair.REBOOT if rebooted else Repair.NONE,
        resume_sent=state.drain is not None and state.drain.resume_sent,  # it may still take effect
    )
    state = replace(state, drain=drain, watch_at=next_watch(drain, at, policy))
    return Decision(state, tuple(Tell(incident=each) for each in found), f"the node is drained: {reason}")


def _recounted(state: State, event: on.NodesAnswered, own: NodeFacts, policy: Policy) -> Decision:
    drain = state.drain
    if drain is None:  # somebody let it go meanwhile
        return Decision(state)
    if not own.drained or own.reason != drain.reason:
        return lost(state, event.at, own, policy)
    if why := plan.gives_back(own, event.nodes, event.at, policy):
        state, effects = call(replace(state, call_reason=why), Call.TAKE_BACK, event.at, policy)
        return Decision(state, effects, f"circuit breaker: {why}: this drain is taken back")
    return Decision(replace(state, drain=replace(drain, counted=True)))


def _watched(state: State, event: on.NodesAnswered, own: NodeFacts, policy: Policy) -> Decision:
    drain, at = state.drain, event.at
    if drain is None:
        return _look_again(state, event, own, policy)
    state = replace(state, watch_at=next_watch(drain, at, policy))
    if not own.drained or own.reason != drain.reason:
        under_way = drain.slurm_returns and not drain.passed and drain.repair is Repair.NONE
        if under_way and not own.drained and own.states & REBOOTING:
            return Decision(state)
        return lost(state, at, own, policy)
    if drain.repair is not Repair.NONE and not drain.passed:
        state, effects = call(state, Call.CHECK, at, policy)
        return Decision(state, effects, f"checks after the {drain.repair.value}")
    if may_return(drain, policy):
        state, effects = call(state, Call.RESUME, at, policy)
        return Decision(state, effects, "the node has passed its checks: it is returned to service")
    cure = remedy(drain, policy)
    if cure is None or own.states & (IN_USE | MAINTAINED):
        return Decision(state)
    state, effects = call(state, cure, at, policy)
    return Decision(state, effects, f"no job uses the node: {cure.value}")


def _look_again(state: State, event: on.NodesAnswered, own: NodeFacts, policy: Policy) -> Decision:
    """Have the node checked where it has a fault that was left alone, and nobody holds it any more."""
    left = left_alone(state)
    refused = is_refused(state)
    state = replace(state, watch_at=look_again_at(state, event.at, policy, refused=refused and not event.alone))
    if own.drained and _is_for(own, left):
        why = "a drain of ours, whose answer was lost, took effect late"
        found = _drained(state, event.at, left, own.reason, policy=policy)
        return Decision(found.state, found.effects, f"{why}: {own.reason}")
    if own.drained or own.states & TAKEN or not left:
        return Decision(state)
    if refused and event.alone:  # one node says nothing of the breaker
        return _listened(replace(state, watch_at=event.at), event, policy)
    # what the breaker still forbids may be found to be over, and is left alone else
    why = plan.breaker_refuses(own, event.nodes, event.at, policy) if refused else ""  # else asked before the drain
    state = replace(state, call_reason=why)
    state, effects = call(state, Call.CHECK, event.at, policy)
    return Decision(state, effects, "nobody holds the node, and it has a fault that was left alone: checks")


def _looked_again(state: State, event: on.CallAnswered) -> Decision:
    """Go on with the faults that were left alone; `call_reason` says what the breaker still forbids."""
    over = [each for each in left_alone(state) if not event.error and is_over(each, event.looked, state)]
    asked_anew = [each for each in left_alone(state) if each not in over and not state.call_reason]
    passed = "the node has passed its checks"
    state = put(
        state,
        *(replace(each, outcome=Outcome.PASSED, outcome_why=passed) for each in over),
        *(replace(each, outcome=Outcome.OPEN) for each in asked_anew),
    )
    whys = [passed for _ in over] + [
        f"the node is in service and has not passed its checks: {event.error}"
        if event.error
        else f"the node is in service, and no check can show whether {each.name} is over: it asks for {each.action}, "
        "and neither reset nor reboot was seen since"
        for each in asked_anew
    ]
    return Decision(state, (), "; ".join(dict.fromkeys(whys)))


def on_call_answered(state: State, event: on.CallAnswered, policy: Policy) -> Decision:  # noqa: C901 - one case a call
    """Go on after an act, or try it again."""
    if event.call != state.call_number or state.call is None:
        return Decision(state)  # of a call that was given up
    kind = state.call
    if event.error and kind in (Call.DRAIN, Call.TAKE_BACK, Call.RESUME, Call.REBOOT):
        return failed(state, event.at, f"{kind.value}: {event.error}", policy)
    # a look asks only NVML: what Slurm is asked next still waits
    state = replace(state, call=None) if kind is Call.LOOK else answered(state)
    match kind:
        case Call.DRAIN:
            wanted = [each for each in state.incidents if each.id in state.call_incidents]
            return _drained(state, event.at, wanted, state.call_reason, policy=policy)
        case Call.TAKE_BACK:
            return taken_back(watching(replace(state, drain=None), event.at, policy, refused=True))
        case Call.RESUME:
            return returned_by_us(state)
        case Call.CHECK:
            return _checked(state, event, policy)
        case Call.LOOK:
            return on_looked(state, event)
        case Call.RESET:
            return _reset(state, event, policy)
        case Call.REBOOT:
            return _rebooting(state, event.at, policy)
        case Call.COUNT | Call.RECOUNT | Call.WATCH:
            return Decision(state)  # an answer of the wrong kind: the call is made again
        case _:
            assert_never(kind)


def _checked(state: State, event: on.CallAnswered, policy: Policy) -> Decision:
    drain = state.drain
    if drain is None:
        return _looked_again(state, event)
    if event.error:
        return _check_failed(state, event, drain, policy)
    drain = replace(drain, passed=True)
    hurry = may_return(drain, policy)
    state = replace(state, drain=drain, watch_at=event.at if hurry else next_watch(drain, event.at, policy))
    text = "the node has passed its checks and waits for a person to return it to service"
    return Decision(state, () if hurry else (Alarm(text=text),), "the node has passed its checks")


def _check_failed(state: State, event: on.CallAnswered, drain: Drain, policy: Policy) -> Decision:
    why = f"the node has not passed its checks: {event.error}"
    if drain.slurm_returns:  # Slurm returns the node on its own: drain it anew, before it takes a job
        drain = replace(drain, reboot_asked=False, reboot_sent=False)
        worse = (replace(each, action=Action.DRAIN_RMA, escalated=why, outcome=Outcome.OPEN) for each in held(state))
        state = put(replace(state, drain=drain), *worse)
    else:
        state = replace(state, watch_at=next_watch(drain, event.at, policy))
    return Decision(state, (Alarm(text=why),), why)


def _reset(state: State, event: on.CallAnswered, policy: Policy) -> Decision:
    drain = state.drain
    if drain is None:
        return Decision(state)
    if event.error:
        drain = replace(drain, reset_failed=True)
        why = f"the reset failed: {event.error}"
    else:
        drain = replace(drain, repair=Repair.RESET)
        why = "the GPUs were reset: the checks come next"
    again = remedy(drain, policy) is not None or drain.repair is Repair.RESET
    watch_at = event.at if again else next_watch(drain, event.at, policy)
    return Decision(replace(state, drain=drain, watch_at=watch_at), (), why)


def _rebooting(state: State, at: float, policy: Policy) -> Decision:
    drain = state.drain
    if drain is None:
        return Decision(state)
    state = replace(state, drain=replace(drain, reboot_asked=True), watch_at=at + policy.watch_s)
    return Decision(state, (), "Slurm reboots the node")


# How a drain that we hold ends, and what becomes of the faults that asked for it: by the checks' word, by the breaker,
# or by somebody else.  A return of ours whose answer was lost is still ours: the faults stay open.


def close(state: State, incidents: Sequence[Incident], outcome: Outcome, why: str) -> Decision:
    """Close incidents without a drain, and say it loudly, once."""
    state = put(state, *(replace(each, outcome=outcome, outcome_why=why) for each in incidents))
    alarms = tuple(Alarm(text=why, incident=each.id) for each in incidents if each.outcome_why != why)
    return Decision(state, alarms, why)


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
    if drain is None:
        return Decision(state)
    if drain.resume_sent and not own.drained:
        return _returned_late(state, at, drain, policy)
    if own.drained:
        outcome, why = Outcome.FOREIGN, f"the drain is somebody else's now: {own.reason}"
    else:
        outcome, why = Outcome.RESOLVED, "somebody else returned the node to service"
    return Decision(_let_go(state, outcome, why, returned=True), (), why)


def _let_go(state: State, outcome: Outcome, why: str, *, returned: bool = False) -> State:
    """Note that we hold no drain any more."""
    ended = (replace(each, outcome=outcome, outcome_why=why, returned=returned) for each in held(state))
    return replace(put(state, *ended), drain=None)


def _returned_late(state: State, at: float, drain: Drain, policy: Policy) -> Decision:
    """Take up that the node is in service by our own word, whose answer was lost: what asked for the drain stands."""
    if drain.passed:
        return returned_by_us(state)
    if not drain.counted:
        return taken_back(watching(replace(state, drain=None), at, policy, refused=True))
    why = "our own return, whose answer was lost, took effect late: the agent drains the node again"
    return Decision(_let_go(state, Outcome.OPEN, why), (), why)


def taken_back(state: State) -> Decision:
    """Note that the breaker had us give the drain back."""
    why = f"circuit breaker: {state.call_reason or 'too many drains'}; look for a common cause"
    return close(state, held(state), Outcome.TAKEN_BACK, why)


def returned_by_us(state: State) -> Decision:
    """Note that the node is in service by its checks."""
    state = _let_go(state, Outcome.RESOLVED, "the node passed its checks and was returned to service")
    return Decision(state, (), "the node is in service again")
