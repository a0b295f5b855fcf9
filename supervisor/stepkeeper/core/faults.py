"""Nodes that are lost, faulty or unfit: leave them, and go on with the others.  Pure.

The cheapest rung that is safe: a spare of the allocation, a smaller world if that is allowed, else a requeue without
the node.  A fault of a node never counts as a failure of the training.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec.structs import replace

from stepkeeper.core import bus
from stepkeeper.core import events as on
from stepkeeper.core import reasons as because
from stepkeeper.core.bus import restart_bus
from stepkeeper.core.exits import ExitCode
from stepkeeper.core.gates import clearing, go_on_starting
from stepkeeper.core.phases import (
    Decision,
    all_ready,
    kept,
    release,
    repeats,
    stop,
    stopping,
)
from stepkeeper.core.placement import places, room, without_nodes
from stepkeeper.core.policy import Policy
from stepkeeper.core.reasons import Why
from stepkeeper.core.scale_up import give_up, may_rest, rest
from stepkeeper.core.state import Blame, Budgets, BusStatus, Next, Phase, Plan, State, Timer

SLURM_MISSES_A_NODE = (  # srun's last words, where it cannot start a step on every node: it kills what it has started
    "requested node configuration is not available",
    "node failure on",
    ": killed",
)


def on_node_faulted(state: State, event: on.NodeFaulted, policy: Policy) -> Decision:
    """A fault of a node's hardware: leave the node where the fault says so; else keep it as a hint."""
    what: Why = (because.NodeFault(node=event.node, name=event.name, text=event.why, gpu=event.gpu),)
    if not event.leave:
        hint = (event.node, f"{event.name}, {event.action}")
        if event.node not in state.nodes.usable or hint in state.launch.hints:
            return Decision(state)
        launch = replace(state.launch, hints=(*state.launch.hints, hint))
        return Decision(replace(state, launch=launch), (), (*what, because.Plain(because.Fact.NODE_STAYS)))
    if event.node not in state.nodes.usable:
        given_up = give_up(state, event.node, what)
        drained = _drained_later(given_up.state, event)
        return Decision(drained.state, given_up.effects, given_up.why or drained.why)
    return _leave(state, event.at, {event.node: what}, policy, exclude=not event.drained)


def _drained_later(state: State, event: on.NodeFaulted) -> Decision:
    """A drained node needs no exclusion, which nobody would lift once it is repaired."""
    if not event.drained or all(exclusion.node != event.node for exclusion in state.nodes.excluded):
        return Decision(state)
    others = tuple(exclusion for exclusion in state.nodes.excluded if exclusion.node != event.node)
    state = replace(state, nodes=replace(state.nodes, excluded=others))
    return Decision(state, (), (because.NodeIs(node=event.node, state="drained"),))


def on_nodes_released(state: State, event: on.NodesReleased) -> Decision:
    """The nodes that were left are given back; or stay in the allocation, unused: the next relaunch tries again."""
    if event.ok:
        return Decision(state, (), (because.NodesReleased(),))
    state = replace(state, nodes=replace(state.nodes, releasing=True))
    return Decision(state, (), (because.NodesReleased(error=event.error),))


def on_nodes_not_cleared(state: State, event: on.NodesNotCleared, policy: Policy) -> Decision:
    """Some nodes do not confirm, such as one whose rank hangs in the driver: leave them; the others can go on."""
    if state.phase is not Phase.STARTING or not clearing(state, event.launch):
        return Decision(state)
    left = [node for node in event.nodes if node in state.nodes.usable]
    if not left or len(left) == len(state.nodes.usable):
        return Decision(state.waiting_until(event.at))  # then the next rougher means: a requeue
    why = {node: (because.NodeIs(node=node, state="not_clear"),) for node in left}
    return _leave(state, event.at, why, policy, exclude=True)


def on_bus_ended(state: State, event: on.BusEnded, policy: Policy) -> Decision:
    """The watchers' Slurm step ended: where Slurm misses a node and one of ours is silent, nobody waits for that one.

    Not beside training: ranks there may live on, and are asked for first.
    """
    silent = tuple(node for node in state.nodes.usable if node in state.watchers.silent)
    missed = any(words in event.error.lower() for words in SLURM_MISSES_A_NODE)
    current = event.bus == state.watchers.bus and state.watchers.open and state.phase is Phase.STARTING
    if not (current and missed and 0 < len(silent) < len(state.nodes.usable)):
        return bus.on_bus_ended(state, event, policy)
    # the others get their full time on the next bus
    watchers = replace(state.watchers, status=BusStatus.ENDED, error=event.error, ready=frozenset())
    state = replace(state, watchers=watchers).waiting_for_nothing()
    return lose_nodes(state, event.at, silent, (are_lost(state, silent),), policy)


def on_slurmd_gone(state: State, event: on.SlurmdGone, policy: Policy) -> Decision:
    """Nothing of Slurm runs on a node, and its watcher is late: nobody waits for it, and the bus stays as it is.

    Not beside training: ranks there may live on.  Our own node has a supervisor, whatever is refused there.
    """
    answered = event.bus != state.watchers.bus and event.node in state.watchers.ready
    ours = event.node == state.identity.batch_node
    if state.phase is not Phase.STARTING or event.node not in state.nodes.usable or answered or ours:
        return Decision(state)
    why = (because.SlurmdGone(node=event.node, silent_s=event.silent_s),)
    return lose_nodes(state, event.at, (event.node,), why, policy)


def on_unfit(state: State, event: on.NodesCleared, policy: Policy) -> Decision:
    """Some nodes failed the checks before a launch: leave them, unless the storage of most did, which is not theirs."""
    found = {unfit.node: unfit.why for unfit in event.unfit if unfit.node in state.nodes.usable}
    left: dict[str, Why] = {node: (because.NodeUnfit(node=node, text=said),) for node, said in found.items()}
    shared = all(unfit.shared for unfit in event.unfit if unfit.node in state.nodes.usable)
    if found and shared and 2 * len(found) > len(state.nodes.usable):
        return _wait_for_common_cause(state, event.at, sum(left.values(), ()), policy)
    if not found:
        return go_on_starting(state, event.at, policy, (because.Plain(because.Fact.UNFIT_NODES_LEFT),))
    rests = may_rest(state, left, policy)
    return _leave(state, event.at, left, policy, exclude=True, rests=rests)


def _wait_for_common_cause(state: State, at: float, said: Why, policy: Policy) -> Decision:
    since = state.start.unfit_since if state.start.unfit_since is not None else at
    why = (because.Plain(because.Fact.MOST_NODES_UNFIT), *said)
    if at - since >= policy.unfit_wait_s:
        return stop(state, at, Plan(next=Next.END, why=why, code=ExitCode.NODES_UNFIT), policy)
    start = replace(state.start, unfit_since=since)
    state = replace(state, start=start).waiting(Timer.UNFIT_RETRY, at + policy.unfit_retry_s)
    return Decision(state, (), (*why, because.CheckAgain(after_s=policy.unfit_retry_s)))


def are_lost(state: State, lost: tuple[str, ...]) -> because.NodesLost:
    """Tell which nodes are lost, and what the newest bus ended with."""
    return because.NodesLost(nodes=lost, error=state.watchers.error)


def was_lost(exclusion: on.Exclusion) -> bool:
    """Tell a node that is excluded because it was lost a moment ago from a faulty one."""
    return any(isinstance(reason, because.LostRecently) for reason in exclusion.reasons)


def lose_nodes(state: State, at: float, lost: tuple[str, ...], why: Why, policy: Policy) -> Decision:
    """Nodes whose watcher does not come back: Slurm marks them DOWN, so they need no exclusion for long."""
    return _leave(state, at, dict.fromkeys(lost, why), policy, exclude=False, lost=True)


def _leave(
    state: State,
    at: float,
    left: Mapping[str, Why],
    policy: Policy,
    *,
    exclude: bool,
    lost: bool = False,
    rests: bool = False,
) -> Decision:
    """Use some nodes no more, and do what follows from that."""
    why: Why = tuple(dict.fromkeys(reason for reasons in left.values() for reason in reasons))
    hit = state.launch.running and bool(set(left) & set(state.launch.nodes))
    needed = hit or not state.launch.running  # else training goes on without it
    nodes, watchers = without_nodes(state, left).nodes, state.watchers
    releasing = nodes.releasing or (not (lost or rests) and bool(set(left) - {state.identity.batch_node}))
    gone = tuple((node, at) for node in left) if lost else ()
    budgets = _counted(state.budgets, at, policy, lost=lost) if needed else state.budgets
    counts = budgets.node_losses > state.budgets.node_losses
    state = replace(
        state,
        nodes=replace(nodes, lost=(*nodes.lost, *gone), releasing=releasing),
        watchers=replace(
            watchers,
            ready=watchers.ready if rests else watchers.ready.difference(left),
            silent=watchers.silent.difference(left),
        ),
        budgets=budgets,
    )
    if rests:
        state = rest(state, at, left, policy)
    if exclude:
        state = exclude_nodes(state, at, left, policy)
    # after training, the next choice of a checkpoint tells first whether a step was verified since
    if state.phase is Phase.STARTING and state.budgets.node_losses > policy.node_losses_max:
        return stop(state, at, Plan(next=Next.END, why=why, code=ExitCode.NODES_LOST), policy)
    match state.phase:
        case Phase.STARTING:
            return _start_without(_uncount_failure_on(state, left), at, why, policy, lost=lost, counts=counts)
        case Phase.TRAINING:
            return _train_without(state, at, why, policy, hit=hit, lost=lost)
        case _:
            return Decision(_blame_node(state, why, hit=hit), (), why)


def _counted(budgets: Budgets, at: float, policy: Policy, *, lost: bool) -> Budgets:
    """Count the loss or fault of nodes; those of a rack may be lost one after the other, and have one cause."""
    before = budgets.nodes_lost_at
    together = lost and before is not None and at - before <= policy.losses_together_s
    return replace(
        budgets,
        node_losses=budgets.node_losses + (not together),
        nodes_lost_at=at if lost else before,
    )


def exclude_nodes(state: State, at: float, left: Mapping[str, Why], policy: Policy) -> State:
    """Keep the next attempts away from nodes."""
    until = at + policy.exclude_for_s
    new = tuple(on.Exclusion(node=node, reasons=why, until=until) for node, why in left.items())
    return _at_most((*(each for each in state.nodes.excluded if each.node not in left), *new), state, policy)


def _at_most(excluded: tuple[on.Exclusion, ...], state: State, policy: Policy) -> State:
    """Exclude no more nodes than allowed: the weakest reasons, which come first, make room."""
    over = len(excluded) - policy.excluded_max if policy.excluded_max else 0
    dropped = tuple(each.node for each in excluded[: max(0, over)])
    nodes = replace(state.nodes, excluded=excluded[len(dropped) :], readmit=(*state.nodes.readmit, *dropped))
    return replace(state, nodes=nodes)


def _uncount_failure_on(state: State, left: Mapping[str, Why]) -> State:
    """The launch before failed on such a node: that was no failure of the training."""
    if not state.budgets.failure_counted or not set(left) & set(state.launch.nodes):
        return state
    if state.failure is None and state.budgets.tried:  # it is settled: take that back too
        last = state.budgets.tried[-1]
        times = repeats(last) - 1
        fewer = (replace(last, count=max(0, last.count - 1), repeats=times),) if times else ()
        state = replace(state, budgets=replace(state.budgets, tried=(*state.budgets.tried[:-1], *fewer)))
    return replace(uncount_failure(state), failure=None)


def uncount_failure(state: State) -> State:
    """The launch before failed, and the training is not to blame."""
    failures = max(0, state.budgets.failures - state.budgets.failure_counted)
    return replace(state, budgets=replace(state.budgets, failure_counted=False, failures=failures))


def leave_on_suspicion(state: State, at: float, node: str, why: Why, policy: Policy, *, lost: bool = False) -> Decision:
    """The launch before failed on this node: the next one runs without it.  A lost one may be back any moment."""
    state = replace(state, budgets=replace(state.budgets, failure_counted=False))
    return _leave(state, at, {node: why}, policy, exclude=not lost, lost=lost)


def without_lost(state: State, at: float, policy: Policy) -> tuple[State, tuple[str, ...]]:
    """Exclude the nodes that Slurm may not miss yet, and return those that the job keeps until its requeue; none: all.

    Else the job would be COMPLETING until the last of them is DOWN, in production for minutes, and Slurm 22.05 would
    then give it GPUs that no step can use; and until then a lost node is one that Slurm may give again.  They come
    before the faulty ones in the list, and so make room for them: a lost node may be back any moment.
    """
    own = state.identity.batch_node
    until = {node: since + policy.exclude_lost_for_s for node, since in state.nodes.lost if node != own}
    lost = [node for node in until if until[node] > at]
    if not lost or not state.nodes.usable:  # where no node is left, it is not the nodes that are lost
        return state, ()
    faulty = tuple(each for each in state.nodes.excluded if not was_lost(each))
    before = tuple(each for each in state.nodes.excluded if was_lost(each) and each.node not in lost)
    known = {each.node for each in faulty}
    why = (because.LostRecently(),)
    new = tuple(on.Exclusion(node=node, reasons=why, until=until[node]) for node in lost if node not in known)
    return _at_most((*before, *new, *faulty), state, policy), kept(state)


def _start_without(state: State, at: float, why: Why, policy: Policy, *, lost: bool, counts: bool) -> Decision:
    if not places(state):
        return stop(state, at, _requeue(state, why), policy)
    released = release(state)
    state = released.state
    if all_ready(state) and not (lost and _is_deaf(state)):
        decision = go_on_starting(state, at, policy, why)
    elif lost or not state.watchers.open:  # no bus starts while a lost node is among its nodes
        decision = restart_bus(state, at, why, policy, counts=counts)
    else:
        decision = Decision(state)  # the others are still starting
    return Decision(decision.state, (*released.effects, *decision.effects), why)


def _train_without(state: State, at: float, why: Why, policy: Policy, *, hit: bool, lost: bool) -> Decision:
    if not hit:
        return _without_a_spare(state, at, (*why, because.Plain(because.Fact.SPARE_ONLY)), policy, lost=lost)
    enough = bool(places(state))
    plan = Plan(next=Next.RELAUNCH, why=why, blame=Blame.NODE) if enough else _requeue(state, why)
    if state.launch.saving is not None and not lost:  # what the ranks have copied may still be written
        state = stopping(state, plan)
        state = replace(state, launch=replace(state.launch, first_failure=why))
        state = state.waiting(Timer.RANKS_LEAVE, at + policy.commit_grace_s)
        return Decision(state, (), (*why, because.Plain(because.Fact.COMMIT_IN_FLIGHT)))
    decision = stop(state, at, plan, policy)
    if enough and (not all_ready(decision.state) or (lost and _is_deaf(state))):
        bus = restart_bus(decision.state, at, why, policy)
        decision = Decision(bus.state, (*decision.effects, *bus.effects), why)
    return decision


def _is_deaf(state: State) -> bool:
    """Tell whether the bus is deaf: its watchers get no orders, for srun passes them on once all have begun."""
    return state.watchers.complete_at is None


def _without_a_spare(state: State, at: float, why: Why, policy: Policy, *, lost: bool) -> Decision:
    """Training goes on; a watcher that is away keeps its deadline."""
    released = release(state)
    state = released.state
    deaf = lost and _is_deaf(state)
    if deaf or not all_ready(state):
        if state.watchers.open and not state.watchers.silent and not deaf:
            return Decision(state, released.effects, why)
        restarted = restart_bus(state, at, why, policy)
        return Decision(restarted.state, (*released.effects, *restarted.effects), why)
    if state.identity.wrapped and not state.launch.all_tasks_started:
        state = state.waiting(Timer.TASKS_STARTED, at + policy.begin_within_s)
    elif not (state.launch.library_seen or state.launch.library_withdrawn):
        state = state.waiting(Timer.LIBRARY, at + policy.announce_within_s)
    else:
        state = state.waiting_for_nothing()
    return Decision(state, released.effects, why)


def _blame_node(state: State, why: Why, *, hit: bool) -> State:
    """The ranks are leaving: if they were to be launched again, it is the node's fault now."""
    plan = state.leaving.plan
    if plan is None or plan.next is not Next.RELAUNCH or not hit:
        return state
    return replace(state, leaving=replace(state.leaving, plan=replace(plan, why=(*plan.why, *why), blame=Blame.NODE)))


def _requeue(state: State, why: Why) -> Plan:
    return Plan(next=Next.REQUEUE, why=(*why, room(state)), blame=Blame.NODE)
