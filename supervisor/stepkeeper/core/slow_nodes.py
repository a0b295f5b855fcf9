"""What follows from a node that holds the others up, and from a launch that steps slower than those before.  Pure."""

from __future__ import annotations

import statistics

import msgspec

from stepkeeper.core import baseline, stragglers
from stepkeeper.core import effects as do
from stepkeeper.core import events as on
from stepkeeper.core import reasons as because
from stepkeeper.core.faults import leave_on_suspicion
from stepkeeper.core.phases import Decision, places, without_nodes
from stepkeeper.core.policy import Policy
from stepkeeper.core.reasons import Reason, Why
from stepkeeper.core.state import Phase, State

REPORT, REPLACE = CHOICES = ("report", "replace")
SLOWEST_LEAST = 1.1  # times as long as the others: else no node is the slowest

replace = msgspec.structs.replace


def on_nodes_paced(state: State, event: on.NodesPaced, policy: Policy) -> Decision:
    """Compare what each node works itself for a step."""
    if not state.launch.runs(event.launch) or state.phase is not Phase.TRAINING:
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
            state = replace(state, launch=replace(state.launch, to_replace=verdict.node))
            has_spare = _has_spare(state, verdict.node)
            said += (because.SpareAtCommit(node=verdict.node) if has_spare else because.SlowNodeStays(its_data=False),)
        elif not verdict.slow and state.launch.to_replace == verdict.node:
            state = replace(state, launch=replace(state.launch, to_replace=""))
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
        return because.KeepsUp(node=verdict.node)
    how, node = verdict.how, verdict.node
    if how.loading_s is not None:
        return because.LoaderSlow(node=node, rank=how.rank, loading_s=how.loading_s, usual_s=how.usual_loading_s)
    return because.NodeSlow(node=node, factor=how.factor, rank=how.rank, of_its_place=verdict.of_its_place)


def _has_spare(state: State, node: str) -> bool:
    return len(places(without_nodes(state, (node,)))) >= len(state.launch.nodes)


def at_commit(state: State, at: float, policy: Policy) -> Decision | None:
    """A checkpoint is there: put a spare in the place of a slow node, if that is wanted and one is there."""
    node = state.launch.to_replace
    if not node or state.phase is not Phase.TRAINING or node not in state.launch.nodes or not _has_spare(state, node):
        return None
    state = replace(state, launch=replace(state.launch, to_replace=""))
    return leave_on_suspicion(state, at, node, (because.SpareAtCommit(node=node, now=True),), policy)


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
