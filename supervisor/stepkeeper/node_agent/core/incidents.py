"""Sightings become incidents: one fault is one, however often it is seen and by whomever.

A fault comes as a burst: several lines, several codes, the kernel's words and NVML's.  What one GPU reports within
`join_s` of an incident's last report belongs to it.  Later members may only raise what it asks for.
"""

from __future__ import annotations

import msgspec

from stepkeeper.node_agent.core.state import CODES_MAX, PLACES_MAX, Incident, Outcome, Policy, State
from stepkeeper.node_agent.sensors.readings import NvmlState
from stepkeeper.node_agent.xid.catalogue import Action, Fault, Kind, Source

replace = msgspec.structs.replace
LASTING = (Kind.HEALTH, Kind.LOST, Kind.STUCK)  # a condition that is seen at every look, until it is mended
LEFT_ALONE = (Outcome.FOREIGN, Outcome.REFUSED, Outcome.TAKEN_BACK)
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
    sequence = fault.sequence if fault.sequence is not None and fault.source is Source.KERNEL else -1
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
        codes=(fault.code,) if fault.code is not None else (),
        decisive=fault.code,
        nvml_codes=(fault.code,) if fault.code is not None and fault.source is Source.NVML else (),
        agreed=_says_itself(fault),
        places=(fault.place,) if fault.place else (),
        sources=(fault.source,),
        pci=fault.pci or "",
        gpu=fault.gpu,
        instance=fault.instance,
        text=fault.text,
        boot_id=fault.boot_id,
        sequence=sequence,
        driver=state.driver,
    )
    return _hurried(incident, fault)


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


def put(state: State, incident: Incident) -> State:
    """Return the state with an incident in its place, or as the newest."""
    found = False
    kept = []
    for each in state.incidents:
        found = found or each.id == incident.id
        kept.append(incident if each.id == incident.id else each)
    return replace(state, incidents=tuple(kept) if found else (*state.incidents, incident))


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


def is_unfinished(incident: Incident) -> bool:
    """Tell whether something is still to come of it."""
    return incident.outcome in (Outcome.OPEN, Outcome.DRAINED, Outcome.SUSPECTED) or is_left_alone(incident)


def is_left_alone(incident: Incident) -> bool:
    """Tell whether it asks for a drain that somebody else's hold, or the breaker, forbade, and is not over."""
    return incident.outcome in LEFT_ALONE and incident.action.drains and not incident.returned


def is_pending(incident: Incident) -> bool:
    """Tell whether the node has to be drained for it, and nobody has dealt with that yet."""
    return incident.outcome is Outcome.OPEN and incident.settled and incident.action.drains


def _new_id(state: State, at: float) -> str:
    """Return `NODE.SECONDS`, unique on this node: it stands in Slurm's reason, and people look for it."""
    taken = {each.id for each in state.incidents}
    base = f"{state.node}.{int(at)}"
    names = (base if number == 1 else f"{base}.{number}" for number in range(1, len(taken) + 2))
    return next(name for name in names if name not in taken)
