"""What comes back is more than it says it is.  Pure.

The same GPU in need of a reset or a reboot a second time is broken.  Faults that programs cause (13, 31) may be the
GPU's own where they come from one place on it, over jobs of different users: then the GPU is checked.  A drain needs
more, for any program can make such faults at will.
"""

from __future__ import annotations

from collections.abc import Iterable

from stepkeeper.node.core.policy import Policy
from stepkeeper.node.core.state import Incident, Outcome
from stepkeeper.node.xid.model import Action

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
