"""Sightings become incidents: one fault is one, however often it is seen and by whomever.

A fault comes as a burst: several lines, several codes, the kernel's words and NVML's.  What one GPU reports within
`join_s` of an incident's last report belongs to it.  Later members may only raise what it asks for.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from stepkeeper.node_agent.core import events as on
from stepkeeper.node_agent.core.events import Alarm, Effect, Record, RecordDrain
from stepkeeper.node_agent.core.plan import Decision, suspected
from stepkeeper.node_agent.core.state import CODES_MAX, PLACES_MAX, Incident, Outcome, Policy, State, is_unfinished
from stepkeeper.node_agent.readings import NvmlState
from stepkeeper.node_agent.xid.catalogue import Action, Fault, Kind, Source
from stepkeeper.node_agent.xid.parse import SYSCTL

replace = msgspec.structs.replace
LASTING = (Kind.HEALTH, Kind.LOST, Kind.STUCK)  # a condition that is seen at every look, until it is mended
NVML_KNOWS_NOT = 999  # what an NVML says that is older than the code
MESSENGERS = (45, 154)  # they follow a cause: the incident keeps the cause's name


def place(state: State, fault: Fault) -> Fault:
    """Return the fault with the GPU's other name, where NVML has reported it, and with our boot where it names none."""
    pci, gpu = fault.pci or "", fault.gpu
    for known_pci, uuid in state.gpus:
        if pci and not gpu and pci == known_pci:
            gpu = uuid
        elif gpu and not pci and gpu == uuid:
            pci = known_pci
    return replace(fault, pci=pci or None, gpu=gpu, boot_id=fault.boot_id or state.boot_id)


def find(state: State, fault: Fault, policy: Policy) -> Incident | None:
    """Return the incident that a placed fault belongs to; the newest, where there are several."""
    candidates = [each for each in state.incidents if each.boot_id == fault.boot_id and same_gpu(each, fault)]
    for incident in reversed(candidates):
        over = incident.outcome in (Outcome.RESOLVED, Outcome.PASSED) and not stands(incident, fault)
        near = not over and incident.first_at - policy.join_s <= fault.at <= incident.last_at + policy.join_s
        if near or _lasts(incident, fault):
            return incident
    return None


def same_gpu(incident: Incident, other: Fault | Incident) -> bool:
    """Tell whether both are about one GPU."""
    if incident.pci and other.pci:
        return incident.pci == other.pci
    if incident.gpu and other.gpu:
        return incident.gpu == other.gpu
    if Kind.LOST in (incident.kind, other.kind) and not (incident.pci and other.pci):
        # a GPU is missing, and it is not known which one: the one that was lost, if one was
        return {incident.kind, other.kind} == {Kind.LOST} or incident.action.severity >= Action.DRAIN_REBOOT.severity
    nameless = not (incident.pci or incident.gpu or other.pci or other.gpu)
    return nameless and incident.kind is other.kind


def _lasts(incident: Incident, fault: Fault) -> bool:
    """Tell whether a condition is the one that the incident is about, whenever it is looked at again."""
    if fault.kind not in LASTING or incident.outcome is Outcome.PASSED:
        return False
    if (incident.outcome is Outcome.RESOLVED or incident.returned) and not stands(incident, fault):
        return False
    return incident.kind is fault.kind or (incident.action.drains and incident.outcome is not Outcome.NOTED)


def stands(incident: Incident, fault: Fault) -> bool:
    """Tell whether a fault is what somebody returned the node with: nothing says that it began after that."""
    return incident.returned and fault.present_at_start


def opened(state: State, fault: Fault, at: float, policy: Policy) -> Incident:
    """Return the incident that a placed fault begins."""
    incident = Incident(
        id=_new_id(state, fault.at),
        first_at=fault.at,
        last_at=fault.at,
        action=fault.action,
        domain=fault.domain,
        kind=fault.kind,
        name=fault.name,
        why=fault.why,
        settle_at=min(fault.at, at) + policy.gather_s,
        decisive=fault.code,
        count=0,
        text=fault.text,
        boot_id=fault.boot_id,
        driver=state.driver,
    )
    return joined(incident, fault)


def joined(incident: Incident, fault: Fault) -> Incident:
    """Return the incident with one more sighting.  Its action is never lowered."""
    codes, sources = incident.codes, incident.sources
    if fault.code is not None and fault.code not in codes and len(codes) < CODES_MAX:
        codes = (*codes, fault.code)
    nvml_codes = incident.nvml_codes
    if fault.source is Source.NVML and fault.code is not None and fault.code not in nvml_codes:
        nvml_codes = (*nvml_codes, fault.code)[:CODES_MAX]
    places = incident.places
    if fault.place and fault.place not in places:
        places = (*places, fault.place)[:PLACES_MAX]
    if fault.source not in sources:
        sources = (*sources, fault.source)
    sequence = incident.sequence
    if fault.source is Source.KERNEL and fault.sequence is not None:
        sequence = max(sequence, fault.sequence)
    incident = replace(
        incident,
        first_at=min(incident.first_at, fault.at),
        last_at=max(incident.last_at, fault.at),
        count=incident.count + 1,
        codes=codes,
        nvml_codes=nvml_codes,
        agreed=incident.agreed or _says_itself(fault),
        places=places,
        sources=sources,
        sequence=sequence,
        pci=incident.pci or fault.pci or "",
        gpu=incident.gpu or fault.gpu,
        instance=incident.instance or fault.instance,
    )
    if fault.action.severity > incident.action.severity:
        incident = replace(
            incident,
            action=fault.action,
            domain=fault.domain,
            why=fault.why,
            text=fault.text,
            decisive=fault.code,
        )
        if fault.code not in MESSENGERS and fault.kind is not Kind.HEALTH:
            incident = replace(incident, name=fault.name, kind=fault.kind)
    elif incident.kind in LASTING and fault.code is not None and fault.action is incident.action:
        incident = replace(incident, name=fault.name, kind=fault.kind, text=fault.text)  # the code says more
    return _hurried(incident, fault)


def _says_itself(fault: Fault) -> bool:
    """Tell whether NVML itself asks for the drain."""
    return fault.source is Source.NVML and fault.action.drains


def agreed(incident: Incident) -> bool:
    """Return whether NVML says so too, as far as it has answered."""
    known = (incident.decisive, NVML_KNOWS_NOT)
    return incident.agreed or (incident.decisive is not None and any(code in known for code in incident.nvml_codes))


def wants_agreement(state: State, incident: Incident, policy: Policy) -> bool:
    """Return whether a fault that asks for a drain is in the kernel log only, and NVML could report more.

    NVML says nothing of switches, nor of the boot before.
    """
    could_tell = state.nvml in (None, NvmlState.READY) and incident.kind is not Kind.SXID
    ours = incident.boot_id == state.boot_id and Source.KERNEL in incident.sources
    return policy.agreement and incident.action.drains and could_tell and ours and not agreed(incident)


def _hurried(incident: Incident, fault: Fault) -> Incident:
    """Settle at once where nothing that follows could explain the fault away."""
    if fault.certain and fault.action.drains:
        return replace(incident, settle_at=min(incident.settle_at, fault.at))
    return incident


def says_more(before: Incident, after: Incident) -> bool:
    """Return whether a change must reach the ledger at once: all but counters and times."""
    same = replace(
        after, count=before.count, last_at=before.last_at, first_at=before.first_at, sequence=before.sequence
    )
    return same != before


def put(state: State, *incidents: Incident) -> State:
    """Return the state with incidents in their places, or as the newest."""
    known = {each.id: each for each in state.incidents} | {each.id: each for each in incidents}
    return replace(state, incidents=tuple(known.values()))


def recorded(before: State, after: State) -> tuple[Effect, ...]:
    """Return what the ledger has to hold of a change: a drain before its incidents, and its end behind theirs.

    So who is killed in between still knows of the drain.
    """
    known = {each.id: each for each in before.incidents}
    touched = [each for each in after.incidents if known.get(each.id) is not each]
    changed = [each for each in touched if each.id not in known or says_more(known[each.id], each)]
    drain = () if after.drain == before.drain else (RecordDrain(drain=after.drain),)
    incidents = tuple(Record(incident=each) for each in changed)
    return (*incidents, *drain) if after.drain is None else (*drain, *incidents)


def forget(state: State, at: float, policy: Policy) -> State:
    """Drop what is old, and the oldest where there are too many.  What is not over stays as long as there is room."""
    if len(state.incidents) <= policy.incidents_max and not any(_is_old(each, at, policy) for each in state.incidents):
        return state
    kept = [each for each in state.incidents if not _is_old(each, at, policy)]
    surplus = len(kept) - policy.incidents_max
    if surplus > 0:
        order = sorted(kept, key=lambda each: (is_unfinished(each), each.last_at))
        gone = {each.id for each in order[:surplus]}
        kept = [each for each in kept if each.id not in gone]
    return replace(state, incidents=tuple(kept))


def _is_old(incident: Incident, at: float, policy: Policy) -> bool:
    return not is_unfinished(incident) and incident.last_at < at - policy.keep_s


def _new_id(state: State, at: float) -> str:
    """Return `NODE.SECONDS`, unique on this node: it stands in Slurm's reason, and people look for it."""
    taken = {each.id for each in state.incidents}
    base = f"{state.node}.{int(at)}"
    names = (base if number == 1 else f"{base}.{number}" for number in range(1, len(taken) + 2))
    return next(name for name in names if name not in taken)


# What comes back is more than it says it is.  Pure.
#
# The same GPU in need of a reset or a reboot a second time is broken.  Faults that programs cause (13, 31) may be the
# GPU's own where they come from one place on it, over jobs of different users: then the agent raises an alarm.  A drain
# needs NVML's word, for any program can make such faults at will.

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

    "" where it is not so, or where that was said already.
    """
    if not _counts(incident):
        return ""
    others = list(others)
    before = [each for each in others if each.id != incident.id and _same(each, incident)]
    before = [each for each in before if each.first_at <= incident.first_at]
    since = incident.first_at - policy.restarts_within_s
    since = max([since, *(each.last_at for each in before if each.named)])
    counted = [
        each
        for each in [*before, incident]
        if each.first_at >= since
        and _counts(each)
        and not each.named
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
    found = [_agreed(each, event.looked, state) for each in suspected(state) if each.id in state.call_incidents]
    # one that is not settled is settled anew, and said then
    alarms = tuple(Alarm(text=each.outcome_why, incident=each.id) for each in found if each.settled)
    return Decision(put(state, *found), alarms, "; ".join(each.outcome_why for each in found))


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


def is_over(incident: Incident, looked: on.Looked | None, state: State) -> bool:
    """Tell whether checks that the node has passed end a fault.

    What NVML alone has shown, a look can show to be gone.  Of what the kernel said, only a GPU that reports its
    recovery action can say that it is over.  What a person has to look at is over where that GPU is not there any more.
    """
    if incident.action is Action.DRAIN_RMA:
        return bool(incident.gpu and state.gpus) and incident.gpu not in dict(state.gpus).values()
    shown = incident.sources == (Source.NVML,) and not incident.codes
    return shown or (looked is not None and incident.pci in looked.vouched)
