"""How a drain that we hold ends, and what becomes of the faults that asked for it.  Pure.

By the checks' word, by the breaker, or by somebody else.  A return of ours whose answer was lost is still ours: the
faults stay open.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from stepkeeper.node_agent.core import effects as do
from stepkeeper.node_agent.core import events as on
from stepkeeper.node_agent.core.incidents import put
from stepkeeper.node_agent.core.plan import Decision, look_again_at, suspected
from stepkeeper.node_agent.core.state import Drain, Incident, Outcome, Policy, State
from stepkeeper.node_agent.xid.catalogue import Action, Kind, Source
from stepkeeper.node_agent.xid.parse import SYSCTL
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
    if drain is None:
        return Decision(state)
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


# What comes back is more than it says it is.  Pure.
#
# The same GPU in need of a reset or a reboot a second time is broken.  Faults that programs cause (13, 31) may be the
# GPU's own where they come from one place on it, over jobs of different users: then the GPU is checked.  A drain
# needs more, for any program can make such faults at will.

PROGRAMS_OWN = frozenset((43, 45))  # the GPU is fine, says NVIDIA: these never count against it


def escalate(
    incident: Incident, others: Iterable[Incident], policy: Policy, *, repaired: bool = False
) -> tuple[Action, str]:
    """Return what an incident asks for in the light of earlier ones, and why; its own action and "" where nothing.

    `repaired`: the node that we hold has been, since it was drained.
    """
    others = list(others)
    before = [each for each in others if each.id != incident.id and _same(each, incident)]
    before = [each for each in before if each.first_at <= incident.first_at]
    action = incident.action
    if action in (Action.DRAIN_RESET, Action.DRAIN_REBOOT):
        since = incident.first_at - policy.repeat_within_s
        earlier = [
            each
            for each in before
            if each.action.drains and each.first_at >= since and _mended(each, incident, repaired=repaired)
        ]
        if earlier:
            days = (incident.first_at - earlier[-1].first_at) / 86400
            return Action.DRAIN_RMA, f"{earlier[-1].name} on this GPU {days:.1f} days before ({earlier[-1].id})"
    return action, ""


def suspicion(incident: Incident, others: Iterable[Incident], policy: Policy) -> str:
    """Say that one place on a GPU cost several jobs their lives, and no job and no user was there each time.

    "" where it is not so, or where the GPU has passed a check since.
    """
    if not _counts(incident):
        return ""
    others = list(others)
    before = [each for each in others if each.id != incident.id and _same(each, incident)]
    before = [each for each in before if each.first_at <= incident.first_at]
    since = incident.first_at - policy.restarts_within_s
    since = max([since, *(each.last_at for each in before if each.checked)])
    counted = [
        each
        for each in [*before, incident]
        if each.first_at >= since
        and _counts(each)
        and not each.checked
        and each.places == incident.places
        and not any(_same_cause(each, other, policy) for other in others)
    ]
    if len(counted) < policy.restarts_max or incident not in counted:
        return ""
    always_there = set.intersection(*(set(each.jobs) for each in counted))
    if always_there:
        return ""  # one job explains them all
    if set.intersection(*(set(each.uids) for each in counted)):
        return ""  # so does one user's program, in however many jobs
    jobs = {job for each in counted for job in each.jobs}
    names = ", ".join(sorted({each.name for each in counted}))
    return f"{len(counted)} faults ({names}) at {incident.places[0]} of this GPU in a day, over {len(jobs)} jobs"


def _counts(incident: Incident) -> bool:
    own = frozenset(incident.codes) <= PROGRAMS_OWN
    known = bool(incident.jobs and incident.uids) and len(incident.places) == 1
    return incident.action is Action.RESTART_JOB and known and not own


def _same_cause(incident: Incident, other: Incident, policy: Policy) -> bool:
    """Tell whether the jobs of an incident had a fault on another GPU at that time: then it is not this GPU's."""
    if other.id == incident.id or not other.codes or other.boot_id != incident.boot_id or _same(other, incident):
        return False
    if other.jobs and not set(other.jobs) & set(incident.jobs):
        return False
    return other.first_at <= incident.last_at + policy.join_s and incident.first_at <= other.last_at + policy.join_s


def _mended(earlier: Incident, incident: Incident, *, repaired: bool) -> bool:
    """Tell whether the GPU was repaired, or moved, between the two: else it is the old fault that speaks again."""
    back = earlier.outcome is Outcome.RESOLVED or (repaired and earlier.outcome is Outcome.DRAINED)
    return (
        back
        or earlier.boot_id != incident.boot_id
        or bool(earlier.pci and incident.pci and earlier.pci != incident.pci)
    )


def _same(one: Incident, other: Incident) -> bool:
    """Compare by UUID: a board that was moved takes its history along."""
    if one.gpu and other.gpu:
        return one.gpu == other.gpu
    return bool(one.pci) and one.pci == other.pci


# What a look at the GPUs says of faults that NVML did not report unasked.  Pure.
#
# The kernel log is the word of one witness: before a drain NVML, where it is there, must not find the GPU well.  What
# a check can say to be over, and what only a reset or reboot ends, is decided here too.

OFF_THE_BUS = 79


def on_looked(state: State, event: on.CallAnswered) -> Decision:
    """Decide what was suspected when the look began."""
    effects: tuple[do.Effect, ...] = ()
    whys: list[str] = []
    for before in suspected(state):
        if before.id in state.call_incidents:
            of_drain = before.action.drains
            incident = _agreed(before, event.looked, state) if of_drain else _checked(before, event)
            whys.append(incident.outcome_why)
            state = put(state, incident)
            effects += (do.Record(incident=incident),)
            if incident.settled:  # else it is settled anew, and said then
                effects += (do.Alarm(text=incident.outcome_why, incident=incident.id),)
    return Decision(state, effects, "; ".join(whys))


def _agreed(incident: Incident, looked: on.Looked | None, state: State) -> Incident:
    """Return what asks for a drain, agreed or doubted."""
    label = f"{incident.name} {incident.gpu_label}".strip()
    known = looked is None or incident.pci in looked.here or incident.pci in dict(state.gpus)
    if looked is None or not looked.answers or (known and not _finds_it_well(incident, looked, state)):
        return replace(incident, agreed=True, settled=False, outcome=Outcome.OPEN, outcome_why=f"{label}: NVML agrees")
    finds = "finds that GPU well" if known else "and the kernel know of no such GPU"
    why = f"the kernel log says {label}, and NVML {finds}: no drain; users can write such records where {SYSCTL} is 1"
    return replace(incident, outcome=Outcome.DOUBTED, outcome_why=why)


def _finds_it_well(incident: Incident, looked: on.Looked, state: State) -> bool:
    """Tell whether NVML contradicts the kernel's log.

    A GPU that answers is on the bus.  Of other faults NVML sends an event, unless it was not listened to then; its
    recovery action shows those too, where the driver has it.
    """
    if incident.kind is Kind.LOST or incident.decisive == OFF_THE_BUS:
        return incident.pci in looked.answering
    listened = state.nvml_since is not None and incident.first_at >= state.nvml_since
    return incident.pci in looked.well and (listened or incident.pci in looked.vouched)


def _checked(incident: Incident, event: on.CallAnswered) -> Incident:
    """Return what programs' faults in one place have led to: a drain only where the check itself finds something."""
    why = incident.outcome_why
    if event.looked is None:
        return replace(incident, outcome=Outcome.NOTED, outcome_why=f"{why}; the GPU cannot be checked: {event.error}")
    if incident.pci in event.looked.well:
        text = f"{why}; the GPU passed its check: run a field diagnostic at the next occasion"
        return replace(incident, outcome=Outcome.NOTED, outcome_why=text, checked=True)
    return replace(
        incident,
        action=Action.DRAIN_RESET,
        escalated=f"{why}; the GPU failed its check: {event.error}",
        agreed=True,
        settled=False,
        outcome=Outcome.OPEN,
        outcome_why="",
    )


def is_over(incident: Incident, looked: on.Looked | None, state: State) -> bool:
    """Tell whether checks that the node has passed end a fault.

    What NVML alone has shown, a look can show to be gone.  Of what the kernel said, only a GPU that reports its
    recovery action can say that it is over.  What a person has to look at is over where that GPU is not there any more.
    """
    if incident.action is Action.DRAIN_RMA:
        return bool(incident.gpu and state.gpus) and incident.gpu not in dict(state.gpus).values()
    shown = incident.sources == (Source.NVML,) and not incident.codes
    return shown or (looked is not None and incident.pci in looked.vouched)
