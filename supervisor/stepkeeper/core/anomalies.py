"""What follows from what is out of the ordinary: a loss, a step that was done again, a slow node or launch.  Pure."""

from __future__ import annotations

import functools
import itertools
import math
import statistics
from collections.abc import Callable
from typing import Concatenate, ParamSpec

from msgspec.structs import replace

from stepkeeper.core import baseline, stragglers
from stepkeeper.core import effects as do
from stepkeeper.core import events as on
from stepkeeper.core import reasons as because
from stepkeeper.core.baseline import MAD_TO_SIGMA
from stepkeeper.core.causes import Cause
from stepkeeper.core.faults import exclude_nodes, leave_on_suspicion
from stepkeeper.core.losses import ENOUGH, NOT_FINITE, Losses, observe
from stepkeeper.core.phases import Decision, kill_for
from stepkeeper.core.placement import places, without_nodes
from stepkeeper.core.policy import Policy
from stepkeeper.core.reasons import Finding, Reason, Why
from stepkeeper.core.state import Next, Phase, State

OFF, REPORT, ROLLBACK = WATCH = ("off", "report", "rollback")


Facts = ParamSpec("Facts")


def observer(
    afresh: Callable[[State], State],
) -> Callable[[Callable[Concatenate[State, Facts], Decision]], Callable[Concatenate[State, Facts], Decision]]:
    """Let a mistake of an observer end no training: it is reported, and the observer begins `afresh`."""

    def of(rule: Callable[Concatenate[State, Facts], Decision]) -> Callable[Concatenate[State, Facts], Decision]:
        @functools.wraps(rule)
        def guarded(state: State, /, *args: Facts.args, **kwargs: Facts.kwargs) -> Decision:
            try:
                return rule(state, *args, **kwargs)
            except Exception as error:  # noqa: BLE001 - numbers come from ranks, and training needs no observer
                failed = because.PartFailed(part=rule.__name__, error=f"{type(error).__name__}: {error}")
                return Decision(afresh(state), (), (failed,))

        return guarded

    return of


@observer(lambda state: replace(state, losses=Losses()))
def watch_loss(state: State, event: on.Progressed, policy: Policy) -> Decision:
    """Take in the loss of a step."""
    if event.step_seconds is None:  # a sign of life between steps: its loss came before
        return Decision(state)
    losses, anomaly = observe(state.losses, event.step, math.nan if event.not_finite else event.loss, policy)
    state = replace(state, losses=losses)
    wanted = policy.loss_not_finite if anomaly is not None and anomaly.rule == NOT_FINITE else policy.loss_spike
    if anomaly is None or wanted == OFF:
        return Decision(state)
    if wanted == REPORT or state.phase is not Phase.TRAINING:
        return Decision(state, (), (anomaly,))
    found = Finding(cause=Cause.NUMERICAL, rule=anomaly.rule, reasons=(anomaly,), step=anomaly.step)
    return kill_for(state, event.at, found, policy)


# What follows from steps that were done again after a resume, and their losses.
#
# The same bits prove that the state came back whole and that this hardware computes as the one before.  Other losses
# in a run that says it is deterministic are a wrong state or a device that computes wrongly, here or there.  Where a
# run is not deterministic, what counts is how far they are, beside what is usual between its steps.

NOISE_SHARE = 0.5  # of what neighbouring steps differ by: the same step on the same data differs by less


@observer(lambda state: state)
def on_replayed(state: State, event: on.Replayed, policy: Policy) -> Decision:
    """Judge the losses of steps that were done again."""
    if event.worst is None:
        why: Why = (because.ReplayEqual(steps=event.steps),)
        return Decision(state, (do.ReportReplay(equal=True, steps=event.steps, reasons=why),), why)
    apart = _distance(event.then, event.now)
    tolerance = _tolerance(state.losses, policy)
    if not event.deterministic and apart <= tolerance:
        then, now = event.then, event.now
        why = (because.ReplayEqual(steps=event.steps, exact=False, step=event.worst, then=then, now=now),)
        return Decision(state, (_report(event, (), why, equal=True),), why)
    before = state.nodes.launched_before
    new = tuple(node for node in state.launch.nodes if before and node not in before)
    why = (
        because.ReplayDiffers(
            step=event.worst,
            then=event.then,
            now=event.now,
            deterministic=event.deterministic,
            new=new,
            changed=event.changed,
        ),
    )
    return Decision(state, (_report(event, new, why, equal=False),), why)


def _report(event: on.Replayed, nodes: tuple[str, ...], why: Why, *, equal: bool) -> do.ReportReplay:
    return do.ReportReplay(
        equal=equal, steps=event.steps, step=event.worst, then=event.then, now=event.now, nodes=nodes, reasons=why
    )


def _tolerance(losses: Losses, policy: Policy) -> float:
    """Return how far the loss of a step may be from itself, as a logarithm."""
    logs = [log for _, log in losses.recent]
    least = math.log(policy.replay_times)
    if len(logs) < ENOUGH:
        return max(least, math.log(policy.loss_times))
    between = [abs(later - earlier) for earlier, later in itertools.pairwise(logs)]
    return max(least, NOISE_SHARE * MAD_TO_SIGMA * statistics.median(between))


def _distance(then: float | None, now: float | None) -> float:
    if then is None or now is None:
        return math.inf
    return abs(math.log(now) - math.log(then)) if then > 0 and now > 0 else abs(now - then)


# What follows from a rank that computed the same twice and came to other bits.

CORRUPTED = "computed-wrongly"


def on_corrupted(state: State, event: on.Corrupted, policy: Policy) -> Decision:
    """End the launch: the next one leaves the node, and goes back to the last step that was confirmed.

    The ranks end by themselves too, and that may be heard of first.
    """
    said = because.ComputedWrongly(
        rank=event.rank,
        node=event.node,
        step=event.step,
        confirmed=event.confirmed,
        what=event.what,
        gpu=event.gpu,
    )
    # a rollback before this launch leaves out nothing that this launch has put into a tier
    state = replace(state, resume=replace(state.resume, went_back=False))
    if event.node in state.nodes.usable:  # a requeue may come before the cause is settled
        state = exclude_nodes(state, event.at, {event.node: (said,)}, policy)
    before = state.launch.found
    if before is not None and before.rule == CORRUPTED:  # several ranks at once: one node is left, all are told of
        back_to = min(event.confirmed, event.confirmed if before.back_to is None else before.back_to)
        found = replace(before, reasons=(*before.reasons, said), back_to=back_to)
    else:
        found = Finding(
            cause=Cause.NODE_FAULT,
            rule=CORRUPTED,
            reasons=(said,),
            node=event.node,
            rank=event.rank,
            step=event.step,
            back_to=event.confirmed,
        )
    look = do.Look(node=event.node, reasons=(said,))
    plan = state.leaving.plan
    saves = state.phase is Phase.SAVING and plan is not None and plan.next is Next.REQUEUE
    if state.phase is Phase.TRAINING or saves:  # a requeue of its own would forget it: what is saved may be wrong
        ended = kill_for(state, event.at, found, policy)
        return Decision(ended.state, (*ended.effects, look), ended.why)
    return Decision(replace(state, launch=replace(state.launch, found=found)), (look,), (said,))


# What follows from a node that holds the others up, and from a launch that steps slower than those before.

REPLACE = "replace"
SLOW_NODE_CHOICES = (REPORT, REPLACE)
SLOWEST_LEAST = 1.1  # times as long as the others: else no node is the slowest


@observer(lambda state: replace(state, stragglers=stragglers.Stragglers()))
def on_nodes_paced(state: State, event: on.NodesPaced, policy: Policy) -> Decision:
    """Compare what each node works itself for a step."""
    if state.phase is not Phase.TRAINING:
        return Decision(state)
    known, verdicts = stragglers.observe_pace(
        state.stragglers,
        state.launch.nodes,
        dict(event.own),
        at=event.at,
        step_seconds=event.step_seconds,
        policy=policy,
        loading=event.loading,
        ranks={node: (rank, seconds) for node, rank, seconds in event.slowest},
    )
    state = replace(state, stragglers=known)
    effects: list[do.Effect] = []
    why: Why = ()
    for verdict in verdicts:
        said: Why = (_reason(verdict),)
        its_data = verdict.slow and verdict.how.loading_s is not None
        if its_data and policy.slow_node == REPLACE:
            said += (because.SlowNodeStays(its_data=True),)
        elif verdict.slow and policy.slow_node == REPLACE and not verdict.of_its_place:
            has_spare = _has_spare(state, verdict.node)
            said += (because.SpareAtCommit(node=verdict.node) if has_spare else because.SlowNodeStays(its_data=False),)
        why += said
        effects.append(
            do.ReportSlowNode(
                node=verdict.node,
                factor=round(verdict.how.factor, 3),
                since=verdict.since,
                over=not verdict.slow,
                rank=verdict.how.rank,
                loading=its_data,
                reasons=said,
            )
        )
    return Decision(state, tuple(effects), why)


def _reason(verdict: stragglers.Verdict) -> Reason:
    if not verdict.slow:
        return because.NodeIs(node=verdict.node, state="keeping_up")
    how, node = verdict.how, verdict.node
    if how.loading_s is not None:
        return because.LoaderSlow(node=node, rank=how.rank, loading_s=how.loading_s, usual_s=how.usual_loading_s)
    return because.NodeSlow(node=node, factor=how.factor, rank=how.rank, of_its_place=verdict.of_its_place)


def _has_spare(state: State, node: str) -> bool:
    return len(places(without_nodes(state, (node,)))) >= len(state.launch.nodes)


def at_commit(state: State, at: float, policy: Policy) -> Decision | None:
    """A checkpoint is there: put a spare in the place of a slow node, if that is wanted and one is there."""
    if state.phase is not Phase.TRAINING or policy.slow_node != REPLACE:
        return None
    node = stragglers.to_replace(state.stragglers, state.launch.nodes)
    if not node or not _has_spare(state, node):
        return None
    return leave_on_suspicion(state, at, node, (because.SpareAtCommit(node=node, now=True),), policy)


@observer(lambda state: replace(state, launch=replace(state.launch, paced=True)))
def watch_pace(state: State, policy: Policy) -> Decision:
    """Compare the launch with those before it, once its own pace is known."""
    if state.launch.paced or len(state.pace.recent) < baseline.WORDS:
        return Decision(state)
    seconds = statistics.median(state.pace.recent)
    known, slower = baseline.stepped(state.baseline, len(state.launch.nodes), seconds, policy)
    if slower is None:
        return Decision(replace(state, baseline=known, launch=replace(state.launch, paced=True)))
    suspects = _suspects(state)
    if not suspects and not state.stragglers.slowest[0] and len(state.pace.recent) < 2 * baseline.WORDS:
        return Decision(state)  # what the nodes take will soon be known, and may name the one that is slow
    state = replace(state, baseline=known, launch=replace(state.launch, paced=True))
    why = (_slow_launch(state, slower, suspects),)
    tell = do.ReportSlowLaunch(seconds=round(slower.seconds, 6), baseline=slower.baseline, nodes=suspects, reasons=why)
    return Decision(state, (tell,), why)


def _new_nodes(state: State) -> tuple[str, ...]:
    return tuple(node for node in state.launch.nodes if node not in state.nodes.launched_before)


def _suspects(state: State) -> tuple[str, ...]:
    """Return the nodes that may be why: those that are new in this launch, else the slowest."""
    new = _new_nodes(state)
    if new and len(new) < len(state.launch.nodes):
        return new
    node, slow = state.stragglers.slowest
    return (node,) if node in state.launch.nodes and slow.factor >= SLOWEST_LEAST else ()


def _slow_launch(state: State, slower: baseline.Slower, suspects: tuple[str, ...]) -> because.LaunchSlow:
    new = _new_nodes(state)
    said = because.LaunchSlow(seconds=slower.seconds, baseline=slower.baseline, launches=slower.launches)
    if not suspects:
        return replace(said, all_new=bool(new))
    if suspects == new:
        return replace(said, new=new)
    node, slow = state.stragglers.slowest
    rank = slow.rank if slow.loading_s is not None else None
    return replace(said, slowest=node, factor=slow.factor, rank=rank)
