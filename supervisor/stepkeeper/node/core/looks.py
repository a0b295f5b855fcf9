"""What a look at the GPUs says of faults that NVML did not report by itself.  Pure.

The kernel log is the word of one witness: before a drain NVML, where it is there, must not find the GPU well.  What a
check can say to be over, and what only a reset or reboot ends, is told here too.
"""

from __future__ import annotations

import msgspec

from stepkeeper.node.core import effects as do
from stepkeeper.node.core import events as on
from stepkeeper.node.core.incidents import put
from stepkeeper.node.core.plan import Decision, suspected
from stepkeeper.node.core.state import Incident, Outcome, State
from stepkeeper.node.xid.model import Action, Kind, Source
from stepkeeper.node.xid.parse import SYSCTL

replace = msgspec.structs.replace
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
    recovery action tells of those too, where the driver has it.
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

    What NVML alone has shown, a look can show to be gone.  Of what the kernel said, only a GPU that tells its recovery
    action can say that it is over; and what a person has to look at is over where that GPU is not there any more.
    """
    if incident.action is Action.DRAIN_RMA:
        return bool(incident.gpu and state.gpus) and incident.gpu not in dict(state.gpus).values()
    shown = incident.sources == (Source.NVML,) and not incident.codes
    return shown or (looked is not None and incident.pci in looked.vouched)
