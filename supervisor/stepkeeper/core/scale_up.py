"""Getting back to the size that a launch wants, after nodes were lost to it.  Pure.

A node that only failed its check rests in the allocation: beside training it is looked at again, less and less often,
and is taken back once it is fit.  Nodes that were given back to Slurm return with a requeue only: for that enough
nodes like ours must have been idle for a while.  Both end a launch right after a checkpoint, with a save of its own,
so that no step is done twice; and only where `grow_back` says so.  While no node is missing, nothing is asked.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from msgspec.structs import replace

from stepkeeper.core import effects as do
from stepkeeper.core import events as on
from stepkeeper.core import reasons as because
from stepkeeper.core.baseline import stop_within_s
from stepkeeper.core.phases import Decision, release, save
from stepkeeper.core.placement import places, without_nodes
from stepkeeper.core.policy import Policy
from stepkeeper.core.reasons import Why
from stepkeeper.core.state import Blame, Growth, Next, Phase, Plan, Resting, State

OFF, LAUNCH, CHECKPOINT = GROW_BACK = ("off", "launch", "checkpoint")
ASKS = 2  # questions to Slurm in the time that enough nodes must be idle
SPREAD = 0.5  # of the pause between two questions: so that not all jobs of a cluster ask in step


def missing(state: State) -> int:
    """Return how many nodes a launch has too few; those that rest are missing too."""
    return max(0, state.nodes.wanted - len(state.launch.nodes))


# --- nodes that failed their check ----------------------------------------------------------------


def may_rest(state: State, left: Collection[str], policy: Policy) -> bool:
    """Tell whether unfit nodes are kept: where no spare takes their place, and the launch can do without them."""
    others = without_nodes(state, left)
    failed = dict(state.nodes.growth.failed)
    again = all(failed.get(node, 0) + 1 < policy.unfit_looks_max for node in left)
    return policy.grow_back != OFF and again and len(others.nodes.usable) < state.nodes.wanted and bool(places(others))


def rest(state: State, at: float, nodes: Iterable[str], policy: Policy) -> State:
    """Keep nodes in the allocation that failed their check; the watchers there stay."""
    growth = _failed(state.nodes.growth, nodes)
    new = tuple(_again(growth, node, at, policy) for node in nodes)
    return _grown(state, replace(growth, resting=(*growth.resting, *new)))


def _grown(state: State, growth: Growth) -> State:
    return replace(state, nodes=replace(state.nodes, growth=growth))


def _failed(growth: Growth, nodes: Iterable[str]) -> Growth:
    counts = dict(growth.failed)
    counts |= {node: counts.get(node, 0) + 1 for node in nodes}
    return replace(growth, failed=tuple(counts.items()))


def _again(growth: Growth, node: str, at: float, policy: Policy) -> Resting:
    doublings = dict(growth.failed).get(node, 1) - 1
    return Resting(node=node, look_at=at + policy.grow_idle_s * 2.0**doublings)


def dismiss(state: State, nodes: frozenset[str]) -> State:
    """Rest no longer: these nodes are given back."""
    growth = state.nodes.growth
    stay = tuple(each for each in growth.resting if each.node not in nodes)
    growth = _answered(replace(growth, resting=stay), nodes)
    return replace(
        state,
        nodes=replace(state.nodes, growth=growth, releasing=True),
        watchers=replace(state.watchers, ready=state.watchers.ready - nodes),
    )


def give_up(state: State, node: str, why: Why) -> Decision:
    """A node that takes no part will not come back: if it rests, it is given back; training goes on."""
    if all(each.node != node for each in state.nodes.growth.resting):
        return Decision(state)
    return _give_back(state, frozenset((node,)), why)


def _give_back(state: State, nodes: frozenset[str], why: Why) -> Decision:
    released = release(dismiss(state, nodes))
    given_back = because.RestingNodes(nodes=tuple(sorted(nodes)), are="given_back")
    return Decision(released.state, released.effects, (*why, given_back))


def on_nodes_checked(state: State, event: on.NodesChecked, policy: Policy) -> Decision:
    """Nodes that rest were looked at: fit ones wait for a launch, others for the next look, or are given back."""
    looked_at = tuple(node for node in event.nodes if node in state.nodes.growth.looked_at)
    if not looked_at:
        return Decision(state)
    unfit = {each.node: each.why for each in event.unfit if each.node in looked_at}
    fit = [node for node in looked_at if node not in unfit]
    why: Why = tuple(because.NodeUnfit(node=node, text=said, again=True) for node, said in unfit.items())
    if fit:
        why += (because.RestingNodes(nodes=tuple(fit), are="fit"),)
    return _looked(_grown(state, _fit(state.nodes.growth, fit)), event.at, unfit, why, policy)


def _fit(growth: Growth, nodes: list[str]) -> Growth:
    resting = tuple(replace(each, look_at=None) if each.node in nodes else each for each in growth.resting)
    return _answered(replace(growth, resting=resting), nodes)


def _answered(growth: Growth, nodes: Iterable[str]) -> Growth:
    looked_at = tuple(node for node in growth.looked_at if node not in set(nodes))
    return replace(growth, looked_at=looked_at, look_until=growth.look_until if looked_at else None)


def _looked(state: State, at: float, unfit: Iterable[str], why: Why, policy: Policy) -> Decision:
    """Some were not fit, as often before perhaps; a fit one need not be excluded from later attempts."""
    growth = _answered(_failed(state.nodes.growth, unfit), unfit)
    resting = tuple(_again(growth, each.node, at, policy) if each.node in unfit else each for each in growth.resting)
    growth = replace(growth, resting=resting)
    fit = [each.node for each in resting if each.look_at is None]
    excluded = tuple(each for each in state.nodes.excluded if each.node not in fit)
    state = replace(state, nodes=replace(state.nodes, growth=growth, excluded=excluded))
    failed = dict(growth.failed)
    over = frozenset(node for node in unfit if failed[node] >= policy.unfit_looks_max)
    return _give_back(state, over, why) if over else Decision(state, (), why)


def take_back(state: State, at: float) -> tuple[State, Why]:
    """For the next launch: the nodes that rest and are fit, or whose time has come; its own checks judge them."""
    back = [
        each.node
        for each in state.nodes.growth.resting
        if each.node in state.watchers.ready and (each.look_at is None or each.look_at <= at)
    ]
    if not back:
        return state, ()
    nodes = tuple(node for node in state.nodes.allocated if node in state.nodes.usable or node in back)
    resting = tuple(each for each in state.nodes.growth.resting if each.node not in back)
    growth = replace(state.nodes.growth, resting=resting, looked_at=(), look_until=None)
    excluded = tuple(each for each in state.nodes.excluded if each.node not in back)
    state = replace(state, nodes=replace(state.nodes, usable=nodes, growth=growth, excluded=excluded))
    return state, (because.RestingNodes(nodes=tuple(back), are="used"),)


# --- beside training ------------------------------------------------------------------------------


def launched(state: State, at: float, policy: Policy) -> State:
    """Begin a launch: only one that lacks nodes has Slurm asked."""
    asks = policy.grow_back == CHECKPOINT and missing(state) > 0
    ask_at = at + _pause_s(state, policy) if asks else None
    growth = replace(state.nodes.growth, ask_at=ask_at, idle_since=None, looked_at=(), look_until=None)
    return _grown(state, growth)


def _pause_s(state: State, policy: Policy) -> float:
    """Return the pause between two questions: each job has its own, and the core has no dice."""
    share = state.identity.job_id * 2654435761 % 2**32 / 2**32
    return policy.grow_idle_s / ASKS * (1.0 + SPREAD * share)


def on_due(state: State, at: float, policy: Policy) -> Decision:
    """Look at nodes that rest; ask for idle ones."""
    growth = state.nodes.growth
    if growth.look_until is not None and at >= growth.look_until:
        why = (because.RestingNodes(nodes=growth.looked_at, are="unanswered"),)
        return _looked(state, at, growth.looked_at, why, policy)
    due = tuple(each.node for each in growth.resting if each.look_at is not None and at >= each.look_at)
    if due and not growth.looked_at:
        growth = replace(growth, looked_at=due, look_until=at + policy.clear_within_s)
        return Decision(
            _grown(state, growth), (do.CheckNodes(nodes=due),), (because.RestingNodes(nodes=due, are="checked"),)
        )
    if growth.ask_at is not None and at >= growth.ask_at:
        growth = replace(growth, ask_at=at + _pause_s(state, policy))
        return Decision(_grown(state, growth), (do.AskIdleNodes(like=state.launch.nodes),))
    return Decision(state)


def on_idle_nodes(state: State, event: on.IdleNodes) -> Decision:
    """Slurm says which nodes like ours are idle."""
    if state.nodes.growth.ask_at is None or state.phase is not Phase.TRAINING:
        return Decision(state)
    enough = not event.error and len(event.nodes) >= missing(state)
    before = state.nodes.growth.idle_since
    since = (before if before is not None else event.at) if enough else None
    state = _grown(state, replace(state.nodes.growth, idle_since=since))
    if (since is None) == (before is None):
        return Decision(state)
    if event.error:
        return Decision(state, (), (because.IdleNodes(error=event.error),))
    return Decision(state, (), (because.IdleNodes(idle=len(event.nodes), missing=missing(state)),))


def at_commit(state: State, at: float, policy: Policy) -> Decision | None:
    """A checkpoint is there: grow, if that is wanted and there is something to grow by."""
    if policy.grow_back != CHECKPOINT or state.phase is not Phase.TRAINING or state.query.asking or missing(state) == 0:
        return None
    grown, _ = take_back(state, at)
    more = len(places(grown)) - len(state.launch.nodes)
    deadline = at + stop_within_s(state.pace, policy)
    if more > 0:
        plan = Plan(next=Next.RELAUNCH, why=(because.GrowInPlace(nodes=more),), blame=Blame.NODE, to_grow=True)
        return save(state, deadline, plan)
    since = state.nodes.growth.idle_since
    if since is None or at - since < policy.grow_idle_s:
        return None
    # Slurm 22.05 asks for the nodes of the submission again at a requeue, whatever was given back before: of `-N 3` it
    # waits for three, of `-N 2-4` it takes up to four, though `scontrol` shows NumNodes as it was reduced
    why = (because.GrowByRequeue(missing=missing(state)),)
    return save(state, deadline, Plan(next=Next.REQUEUE, why=why, to_grow=True))
