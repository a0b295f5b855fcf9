"""The agent's rules: `decide(state, event, policy)` returns the next state, what to do, and why.

Pure.  Only faults that the node's own sensors saw come here: what a job's user says makes sensors look, no more.
"""

from __future__ import annotations

from typing import assert_never

import msgspec

from stepkeeper.node_agent.core import events as on
from stepkeeper.node_agent.core.answers import on_call_answered, on_nodes_answered
from stepkeeper.node_agent.core.events import Alarm, Effect, ListJobs, Tell
from stepkeeper.node_agent.core.incidents import (
    agreed,
    escalate,
    find,
    forget,
    joined,
    opened,
    place,
    put,
    recorded,
    stands,
    suspicion,
    wants_agreement,
)
from stepkeeper.node_agent.core.plan import Decision, proceed, suspected
from stepkeeper.node_agent.core.state import (
    JOBS_MAX,
    LEFT_ALONE,
    Call,
    Incident,
    Mode,
    Outcome,
    Policy,
    Repair,
    State,
    is_left_alone,
    is_pending,
)
from stepkeeper.node_agent.readings import NvmlState
from stepkeeper.node_agent.xid.catalogue import Action, Fault, Kind, Source

replace = msgspec.structs.replace
LATE_S = 86400.0
"""What the kernel said longer ago than this when we read it first may have been mended since, but by no reboot."""


def decide(state: State, event: on.Event, policy: Policy) -> Decision:
    """Return what changes and what to do about one event.  Never raises."""
    match event:
        case on.Started():
            decision = _on_started(state, event, policy)
        case on.FaultSeen():
            decision = _on_fault_seen(state, event, policy)
        case on.GpusListed():
            decision = _on_gpus_listed(state, event)
        case on.NvmlStands():
            decision = _on_nvml_stands(state, event, policy)
        case on.GpusReset():
            decision = _on_gpus_reset(state, event)
        case on.JobsListed():
            decision = _on_jobs_listed(state, event, policy)
        case on.NodesAnswered():
            decision = on_nodes_answered(state, event, policy)
        case on.CallAnswered():
            decision = on_call_answered(state, event, policy)
        case on.Tick():
            decision = Decision(state)
        case _:
            assert_never(event)  # a new event without a branch fails mypy, not production
    decision = proceed(_settle_due(decision, event.at, policy), event.at, policy)
    return replace(decision, effects=recorded(state, decision.state) + decision.effects)


def _on_started(state: State, event: on.Started, policy: Policy) -> Decision:
    """Take up what is left: a held drain after a reboot needs its checks; a drain that was wanted is wanted still."""
    incidents = tuple(_taken_up(state, each, policy) for each in state.incidents)
    state = replace(state, observing=policy.mode is Mode.OBSERVE, incidents=incidents)
    drain = state.drain
    if drain is None:
        return Decision(state)
    why = ""
    if policy.mode is Mode.OBSERVE:
        drain = replace(drain, counted=True)  # an agent that only observes takes nothing back
    if drain.boot_id != state.boot_id and drain.repair is not Repair.REBOOT:
        drain = replace(drain, repair=Repair.REBOOT, passed=False)
        why = "the node was rebooted: its drain stays until the checks pass"
    state = replace(state, drain=drain, watch_at=event.at)  # a person may have taken it away meanwhile
    return Decision(state, (), why)


def _taken_up(state: State, incident: Incident, policy: Policy) -> Incident:
    """Return an incident of the ledger as it stands at our start."""
    rebooted = incident.boot_id != state.boot_id and incident.action is not Action.DRAIN_RMA
    if policy.mode is Mode.OBSERVE and is_pending(incident):
        return replace(incident, outcome=Outcome.OBSERVED, outcome_why="the agent only observes now")
    if rebooted and is_left_alone(incident):
        return replace(incident, outcome=Outcome.PASSED, outcome_why="the node was rebooted since")
    if incident.outcome is Outcome.SUSPECTED and (rebooted or not incident.action.drains):  # the latter: of 0.1
        return replace(incident, outcome=Outcome.NOTED, outcome_why="the agent ended before a look at the GPUs")
    if incident.outcome is Outcome.DRAINED and state.drain is None and not rebooted and policy.mode is Mode.ACT:
        why = "the ledger has no drain for it: the agent asks Slurm again"  # of a version that wrote them in that order
        return replace(incident, outcome=Outcome.OPEN, outcome_why=why)
    return incident


def _on_nvml_stands(state: State, event: on.NvmlStands, policy: Policy) -> Decision:
    """Note how NVML is doing; what waits for its agreement waits no longer where it cannot answer any more."""
    since = state.nvml_since if state.nvml is event.state else event.at
    state = replace(state, nvml=event.state, nvml_since=since if event.state is NvmlState.READY else None)
    for incident in suspected(state):
        if not wants_agreement(state, incident, policy):
            state = put(state, replace(incident, settled=False))
    return Decision(state)


def _on_gpus_reset(state: State, event: on.GpusReset) -> Decision:
    """Close what was left alone and asked for a reset: it has been made."""
    asked = [each for each in state.incidents if is_left_alone(each) and each.action is Action.DRAIN_RESET]
    over = [each for each in asked if each.last_at < event.at and (not event.pci or each.pci in ("", event.pci))]
    state = put(state, *(replace(each, outcome=Outcome.PASSED, outcome_why=event.why) for each in over))
    return Decision(state, (), event.why if over else "")


def _on_fault_seen(state: State, event: on.FaultSeen, policy: Policy) -> Decision:
    fault = place(state, event.fault)
    if fault.source is Source.KERNEL and fault.boot_id == state.boot_id and _is_known(state, fault.sequence):
        return Decision(state)
    before = find(state, fault, policy)
    if before is None:
        incident = opened(state, fault, event.at, policy)
        state = forget(put(state, incident), event.at, policy)
        effects = () if incident.action is Action.LOG else (ListJobs(incident=incident.id),)
        return Decision(state, effects, f"{incident.name} {incident.gpu_label}".strip() + f": {incident.why}")
    if stands(before, fault):
        return _left_in_service(state, before, fault, policy)
    incident = joined(before, fault)
    agreed_later = before.outcome in (Outcome.SUSPECTED, Outcome.DOUBTED) and agreed(incident)
    if before.settled and (incident.action is not before.action or agreed_later or _still_there(before, fault, policy)):
        incident = replace(incident, settled=False, outcome=Outcome.OPEN, outcome_why="")  # it is settled anew
    state = put(state, incident)
    if incident.action is before.action:
        return Decision(state)
    effects = (ListJobs(incident=incident.id),) if before.action is Action.LOG else ()
    return Decision(state, effects, f"{incident.id} raised to {incident.action}: {incident.why}")


def _left_in_service(state: State, before: Incident, fault: Fault, policy: Policy) -> Decision:
    """Note that a node was returned, by somebody who knows of the fault, with it: his decision, and said aloud."""
    incident = replace(before, last_at=max(before.last_at, fault.at), count=before.count + 1)
    state = put(state, incident)
    if fault.at <= before.last_at + policy.join_s or not fault.action.drains:
        return Decision(state)
    text = f"still there, and somebody returned the node with it: left in service: {fault.why}"
    return Decision(state, (Alarm(text=text, incident=incident.id),), text)


def _still_there(before: Incident, fault: Fault, policy: Policy) -> bool:
    """Tell whether a fault that was left alone is seen to last: circumstances may have changed, so ask anew."""
    left_alone = before.outcome in LEFT_ALONE
    left_alone = left_alone or (before.outcome is Outcome.OBSERVED and policy.mode is Mode.ACT)
    seen_now = fault.kind in (Kind.HEALTH, Kind.LOST) and fault.action.drains
    return left_alone and seen_now and fault.at > before.last_at + policy.join_s


def _is_known(state: State, sequence: int | None) -> bool:
    return sequence is not None and sequence <= state.known_sequence


def _on_gpus_listed(state: State, event: on.GpusListed) -> Decision:
    """Remember every GPU since the boot: a lost one is not listed any more, and its UUID is wanted then."""
    known = dict(state.gpus) | {gpu.pci: gpu.uuid for gpu in event.gpus if gpu.uuid}
    return Decision(replace(state, gpus=tuple(sorted(known.items())), driver=event.driver or state.driver))


def _on_jobs_listed(state: State, event: on.JobsListed, policy: Policy) -> Decision:
    for incident in state.incidents:
        if incident.id == event.incident and not incident.jobs and event.jobs:
            # a list that is cut short names too few who may be to blame: then none
            uids = event.uids if max(len(event.jobs), len(event.uids)) <= JOBS_MAX else ()
            incident = replace(incident, jobs=event.jobs[:JOBS_MAX], uids=uids)  # noqa: PLW2901 - the same one
            state = put(state, incident)
            if incident.settled and incident.outcome is Outcome.NOTED:
                return _settle(state, incident, event.at, policy)
    return Decision(state)


def _settle_due(decision: Decision, at: float, policy: Policy) -> Decision:
    """Settle every incident whose burst is over, or that is certain."""
    for incident in decision.state.incidents:
        if not incident.settled and at >= incident.settle_at:
            settled = _settle(decision.state, incident, at, policy)
            decision = Decision(
                settled.state, decision.effects + settled.effects, "; ".join(filter(None, (decision.why, settled.why)))
            )
    state = decision.state
    waited_for = {each.id for each in suspected(state)}
    if state.call is Call.LOOK and not waited_for.intersection(state.call_incidents):
        state = replace(state, call=None)  # NVML has reported it already: nobody waits for the look
    return Decision(state, decision.effects, decision.why)


def _settle(state: State, incident: Incident, at: float, policy: Policy) -> Decision:
    """Decide what an incident asks for: from now on it may only be raised."""
    action, escalated = escalate(
        incident,
        state.incidents,
        policy,
        repaired=state.drain is not None and state.drain.repair is not Repair.NONE,
    )
    if action.severity > incident.action.severity:
        incident = replace(incident, action=action, escalated=escalated)
    outcome, why = _outcome(state, incident, at, policy)
    if suspicious := suspicion(incident, state.incidents, policy):
        why = f"{suspicious}: run a field diagnostic of the GPU at the next occasion"
    incident = replace(
        incident, settled=True, outcome=outcome, outcome_why=why, named=incident.named or bool(suspicious)
    )
    state = put(state, incident)
    effects: tuple[Effect, ...] = ()
    doubtful = outcome is Outcome.SUSPECTED  # no job leaves for it yet
    if incident.action is not Action.LOG and incident.boot_id == state.boot_id and not doubtful:
        effects += (Tell(incident=incident),)
    if outcome is Outcome.OBSERVED or suspicious:
        effects += (Alarm(text=why, incident=incident.id),)
    return Decision(state, effects, why)


def _outcome(state: State, incident: Incident, at: float, policy: Policy) -> tuple[Outcome, str]:
    label = f"{incident.name} {incident.gpu_label}".strip()
    escalated = f" ({incident.escalated})" if incident.escalated else ""
    if not incident.action.drains:
        return Outcome.NOTED, f"{label} asks for {incident.action}: the node stays"
    if incident.boot_id != state.boot_id and incident.action is not Action.DRAIN_RMA:
        return Outcome.NOTED, f"{label} was in an earlier boot: the node was rebooted since"
    is_late = incident.sources == (Source.KERNEL,) and incident.last_at < at - LATE_S
    if is_late and incident.action is Action.DRAIN_RESET:
        return Outcome.NOTED, f"{label} was logged long before we read it: NVML says whether it still holds"
    if wants_agreement(state, incident, policy):
        return Outcome.SUSPECTED, f"{label} stands in the kernel log only: NVML is asked"
    if policy.mode is Mode.OBSERVE:
        return Outcome.OBSERVED, f"observing: {label} asks for {incident.action}{escalated}, the node would be drained"
    return Outcome.OPEN, f"{label} asks for {incident.action}{escalated}: the node has to be drained"
