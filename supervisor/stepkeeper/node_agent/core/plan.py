"""Which call comes next.  At most one is in flight; what hurries comes first.  Pure.

a fault that is suspected     LOOK: does NVML agree, did the GPU pass?
a drain that is wanted        COUNT, our own node alone first, then all; then DRAIN, at once; RECOUNT a moment later
a drain that we hold          WATCH, from time to time: has a person taken it away, may a remedy begin?
a fault that was left alone   WATCH, from time to time; where nobody holds the node any more: CHECK, then COUNT as above
what the breaker refused      WATCH, our own node alone first, then all; the rest likewise
after a reset or a reboot     CHECK, and where it passed and we may: WATCH, then RESUME
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import assert_never

import msgspec

from stepkeeper.node_agent.core.events import (
    Alarm,
    AskNodes,
    CheckNode,
    Effect,
    Reboot,
    ResetGpus,
    Resume,
    SetDrain,
)
from stepkeeper.node_agent.core.state import (
    Call,
    Drain,
    Incident,
    Mode,
    Outcome,
    Policy,
    Repair,
    State,
    is_left_alone,
    is_pending,
)
from stepkeeper.node_agent.xid.catalogue import Action
from stepkeeper.slurm.client import REASON_PREFIX, NodeFacts

replace = msgspec.structs.replace
REASON_CHARACTERS_MAX = 240
RECOUNT_AFTER_S = 1.5
"""Slurm's times are whole seconds, and within one the name decides: wait until nobody can drain in ours any more."""
RECOUNT_SPREAD_S = 2.0
REFUSED_WATCHES = 12
"""What the breaker refused is looked at again after this many `watch_s`: an hour, as the breaker counts by the hour."""


class Decision(msgspec.Struct, frozen=True):
    """The next state, a work order, and one clause that says why (empty when nothing changed)."""

    state: State
    effects: tuple[Effect, ...] = ()
    why: str = ""


def pending(state: State) -> list[Incident]:
    """Return the incidents that the node has to be drained for, the most severe first."""
    return sorted(filter(is_pending, state.incidents), key=lambda each: -each.action.severity)


def left_alone(state: State) -> list[Incident]:
    """Return the faults that asked for a drain which somebody, or the breaker, forbade, and that are not over."""
    return [] if state.observing or state.drain is not None else list(filter(is_left_alone, state.incidents))


def is_refused(state: State) -> bool:
    """Return whether the breaker is why a fault was left alone: only a count of all nodes shows if it still is."""
    return any(each.outcome in (Outcome.REFUSED, Outcome.TAKEN_BACK) for each in left_alone(state))


def suspected(state: State) -> list[Incident]:
    """Return the faults for which the GPUs have to be looked at."""
    return [each for each in state.incidents if each.outcome is Outcome.SUSPECTED]


def proceed(decision: Decision, at: float, policy: Policy) -> Decision:
    """Add the call that is due, if none is in flight."""
    state = decision.state
    if state.call is not None and at >= state.call_until:
        late = failed(state, at, f"{state.call.value}: no answer in time", policy)
        state = late.state
        decision = Decision(state, decision.effects + late.effects, decision.why or late.why)
    if state.listened and not (pending(state) or left_alone(state)):  # nobody waits for the count of all nodes
        state = replace(state, listened=False, retry_at=0.0)
        decision = replace(decision, state=state)
    kind = _next_call(state, at) if state.call is None else None
    if kind is None:
        return decision
    if kind is Call.LOOK:
        state = replace(state, call_incidents=tuple(each.id for each in suspected(state)))
    state, effects = call(state, kind, at, policy)
    return Decision(state, decision.effects + effects, decision.why)


def _next_call(state: State, at: float) -> Call | None:
    if pending(state) and at >= state.retry_at:
        return Call.COUNT
    if suspected(state):
        return Call.LOOK  # of NVML: it does not wait until Slurm may be asked
    if at < state.retry_at:
        return None
    drain = state.drain
    if drain is not None and not drain.counted:
        return Call.RECOUNT if at >= recount_at(state, drain) else None
    if at < state.watch_at or (drain is None and not left_alone(state)):
        return None
    return Call.CHECK if drain is not None and _checks_first(drain) else Call.WATCH


def due_at(state: State) -> float | None:
    """Return when `Tick` has to come; None: only an event brings something new."""
    dues = [each.settle_at for each in state.incidents if not each.settled]
    if state.call is not None:
        dues.append(state.call_until)
    elif suspected(state):
        dues.append(0.0)
    elif pending(state):
        dues.append(state.retry_at)
    elif state.drain is not None and not state.drain.counted:
        dues.append(max(state.retry_at, recount_at(state, state.drain)))
    elif state.drain is not None or left_alone(state):
        dues.append(max(state.watch_at, state.retry_at))
    return min(dues, default=None)


def call(state: State, kind: Call, at: float, policy: Policy) -> tuple[State, tuple[Effect, ...]]:
    """Put a call in flight."""
    number = state.call_number + 1
    within_s = policy.answer_within_s + (policy.reset_within_s if kind is Call.RESET else 0.0)
    state = replace(state, call=kind, call_number=number, call_until=at + within_s)
    # the ledger notes a call that may return the node: its answer may be lost, and we may end before it comes
    drain = state.drain
    if drain is not None and kind is Call.REBOOT:
        state = replace(state, drain=replace(drain, reboot_sent=True))
    elif drain is not None and kind in (Call.TAKE_BACK, Call.RESUME):
        state = replace(state, drain=replace(drain, resume_sent=True))
    return state, (_effect(state, kind, number, policy),)


def _effect(state: State, kind: Call, number: int, policy: Policy) -> Effect:
    match kind:
        case Call.COUNT | Call.WATCH:
            counts = state.listened and (kind is Call.COUNT or is_refused(state))
            return AskNodes(call=number, alone=not counts, crowded_s=policy.crowded_s)
        case Call.RECOUNT:
            return AskNodes(call=number)
        case Call.DRAIN:
            return SetDrain(call=number, reason=state.call_reason)
        case Call.TAKE_BACK | Call.RESUME:
            return Resume(call=number)
        case Call.CHECK | Call.LOOK:
            return CheckNode(call=number)
        case Call.RESET:
            return ResetGpus(call=number, pcis=gpus_to_reset(state))
        case Call.REBOOT:
            return Reboot(call=number, reason=state.call_reason if state.drain is None else state.drain.reason)
        case _:
            assert_never(kind)


def answered(state: State) -> State:
    """Return the state with nothing in flight, after a call that came through."""
    return replace(state, call=None, tries=0, retry_at=0.0)


def failed(state: State, at: float, error: str, policy: Policy) -> Decision:
    """Try again, after a pause that grows and differs from node to node."""
    pause: float = min(policy.retry_max_s, policy.retry_s * 2.0 ** min(state.tries, 16))
    pause *= 0.75 + 0.5 * fraction(f"{state.node} {state.tries}")
    state = replace(state, call=None, tries=state.tries + 1, retry_at=at + pause)
    effects: tuple[Effect, ...] = ()
    if state.tries == 1 or state.tries % 60 == 0:
        effects = (Alarm(text=f"a call failed and will be made again: {error}"),)
    return Decision(state, effects, f"{error}; again in {pause:.1f} s")


def fraction(name: str) -> float:
    """Return a number from 0 to 1 that differs from name to name, so that agents spread their calls."""
    return zlib.crc32(name.encode()) / 2**32


def recount_at(state: State, drain: Drain) -> float:
    """Return when the breaker is looked at again after a drain."""
    return drain.at + RECOUNT_AFTER_S + RECOUNT_SPREAD_S * fraction(f"{state.node} recount")


def _checks_first(drain: Drain) -> bool:
    """Tell whether the node must pass its checks now: after a repair, and before Slurm is asked."""
    return drain.repair is not Repair.NONE and not drain.passed and drain.slurm_returns


def may_return(drain: Drain, policy: Policy) -> bool:
    """Tell whether the node may be returned to service by us."""
    allowed = policy.mode is Mode.ACT and policy.undrain
    return allowed and drain.passed and drain.action is not Action.DRAIN_RMA


def remedy(drain: Drain, policy: Policy) -> Call | None:
    """Return what we may do about a drained node, once no job uses it any more."""
    if policy.mode is Mode.OBSERVE or drain.action is Action.DRAIN_RMA:
        return None
    if drain.repair is not Repair.NONE or drain.reboot_asked:
        return None
    if drain.action is Action.DRAIN_RESET and policy.reset_gpus and not drain.reset_failed:
        return Call.RESET
    if policy.reboot and policy.undrain:
        return Call.REBOOT
    return None


def next_watch(drain: Drain, at: float, policy: Policy) -> float:
    """Return when Slurm is asked about our drain next."""
    if drain.repair is not Repair.NONE and not drain.passed:
        return at + policy.check_again_s
    pause = policy.idle_poll_s if remedy(drain, policy) is not None else policy.watch_s
    return at + pause * (0.75 + 0.5 * fraction(f"{drain.reason} {at}"))


def look_again_at(state: State, at: float, policy: Policy, *, refused: bool) -> float:
    """Return when Slurm is asked again who holds a node whose fault was left alone."""
    return at + policy.watch_s * (REFUSED_WATCHES if refused else 1) * (0.75 + 0.5 * fraction(f"{state.node} {at}"))


def waits_for_crowd(state: State, at: float) -> bool:
    """Tell whether a drain is wanted, and waits because many agents ask Slurm: whether it may be made is not known."""
    return state.listened and at < state.retry_at


def gpus_to_reset(state: State) -> tuple[str, ...]:
    """Return the PCI addresses of the GPUs that the node is drained for."""
    held = (each for each in state.incidents if each.outcome is Outcome.DRAINED and each.boot_id == state.boot_id)
    return tuple(sorted({each.pci for each in held if each.pci and each.action is Action.DRAIN_RESET}))


def reason_for(incident: Incident, note: str = "") -> str:
    """Return what stands in Slurm: `stepkeeper: XID 79 GPU 0000:3b:00.0 (GPU-…) drain_reboot: why [incident]`."""
    end = f" [{incident.id}]"
    label = f" {incident.gpu_label}" if incident.gpu_label else ""
    why = incident.escalated or incident.why
    text = f"{REASON_PREFIX} {incident.name}{label} {incident.action.value}: {why}"
    if note:
        text += f"; the node's reason was: {note}"
    plain = "".join(character if " " <= character <= "~" and character not in "\"'" else " " for character in text)
    return plain[: REASON_CHARACTERS_MAX - len(end)].rstrip() + end


# The circuit breaker: how many nodes may be drained by Stepkeeper at once.  Counted in Slurm itself.  Pure.
#
# What befalls many nodes at once is the fabric, the driver or a job: draining them all would help nobody.  Agents do
# not talk to each other.  Each counts before it drains; two may pass together, so each counts again after its own
# drain, and the later ones, by (time of the reason, name), give theirs back.

HOUR_S = 3600.0


def limit(size: int, policy: Policy) -> int:
    """Return how many nodes of a partition of `size` nodes we may hold.

    >>> limit(4, Policy()), limit(100, Policy())
    (2, 5)
    """
    return max(policy.nodes_min, int(size * policy.nodes_share))


def breaker_refuses(node: NodeFacts, nodes: Sequence[NodeFacts], at: float, policy: Policy) -> str:
    """Say why one more drain, of `node`, would be too many; "" where it is not."""
    return _too_many(node, [each for each in _held(nodes) if each.name != node.name], nodes, at, policy)


def gives_back(node: NodeFacts, nodes: Sequence[NodeFacts], at: float, policy: Policy) -> str:
    """Say why the drain of `node`, which has just been made, must be taken back; "" where it may stay."""
    return _too_many(node, [each for each in _held(nodes) if _order(each) < _order(node)], nodes, at, policy)


def _too_many(
    node: NodeFacts, before: Sequence[NodeFacts], nodes: Sequence[NodeFacts], at: float, policy: Policy
) -> str:
    """Say why a drain is too many behind those `before` it."""
    for partition in node.partitions:
        size = sum(partition in each.partitions for each in nodes)
        held = sum(partition in each.partitions for each in before)
        if held >= (most := limit(size, policy)):
            return f"{held} of {size} nodes of partition {partition} are drained by Stepkeeper, and {most} may be"
    lately = sum(each.reason_at is not None and each.reason_at > at - HOUR_S for each in before)
    if lately >= policy.drains_per_hour:
        return f"{lately} nodes were drained by Stepkeeper in the last hour, and {policy.drains_per_hour} may be"
    return ""


def _held(nodes: Sequence[NodeFacts]) -> list[NodeFacts]:
    return [each for each in nodes if each.ours and each.drained]


def _order(node: NodeFacts) -> tuple[float, str]:
    return node.reason_at or 0.0, node.name
