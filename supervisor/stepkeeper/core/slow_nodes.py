"""What follows from a node that holds the others up, and from a launch that steps slower than those before.  Pure."""

from __future__ import annotations

import statistics

import msgspec

from stepkeeper.core import effects as do
from stepkeeper.core import events as on
from stepkeeper.core import stragglers, usual
from stepkeeper.core.faults import leave_on_suspicion
from stepkeeper.core.phases import Decision
from stepkeeper.core.places import places
from stepkeeper.core.policy import Policy
from stepkeeper.core.state import Phase, State

TELL, REPLACE = CHOICES = ("tell", "replace")
SLOWEST_LEAST = 1.1  # times as long as the others: else no node is the slowest
NAMED_MAX = 4

replace = msgspec.structs.replace


def on_nodes_paced(state: State, event: on.NodesPaced, policy: Policy) -> Decision:
    """Compare what each node works itself for a step."""
    if event.launch != state.launch or not state.running or state.phase is not Phase.TRAINING:
        return Decision(state)
    known, verdicts = stragglers.heard(
        state.stragglers,
        state.launched,
        dict(event.own),
        at=event.at,
        step_seconds=event.step_seconds,
        policy=policy,
        loading=event.loading,
        ranks={node: (rank, seconds) for node, rank, seconds in event.slowest},
    )
    state = replace(state, stragglers=known)
    effects, words = [], []
    for verdict in verdicts:
        word = _in_words(verdict)
        its_data = verdict.slow and verdict.how.loading_s is not None
        if its_data and policy.slow_node == REPLACE:
            word += "; the node is not replaced for it"
        elif verdict.slow and policy.slow_node == REPLACE and not verdict.of_its_place:
            state = replace(state, to_replace=verdict.node)
            spare = "a spare takes its place" if _has_spare(state, verdict.node) else "no spare is there for it"
            word += f"; {spare}{', at the next checkpoint' if _has_spare(state, verdict.node) else ''}"
        elif not verdict.slow and state.to_replace == verdict.node:
            state = replace(state, to_replace="")
        words.append(word)
        effects.append(
            do.TellSlowNode(
                node=verdict.node,
                factor=round(verdict.how.factor, 3),
                since=verdict.since,
                over=not verdict.slow,
                rank=verdict.how.rank,
                loading=its_data,
                why=word,
            )
        )
    return Decision(state, tuple(effects), "; ".join(words))


def _in_words(verdict: stragglers.Verdict) -> str:
    if not verdict.slow:
        return f"{verdict.node} keeps up with the other nodes again"
    how = verdict.how
    if how.loading_s is not None:
        return (
            f"the data loader of rank {how.rank} on {verdict.node} is slow, and not the node: it takes "
            f"{how.loading_s:.3g} s for a step, and {how.usual_loading_s:.3g} s elsewhere"
        )
    who = "its ranks work" if how.rank is None else f"rank {how.rank} works"
    word = f"{verdict.node} is slow: {who} {how.factor:.2f} times as long for a step as the others"
    if verdict.of_its_place:
        word += f"; {verdict.of_its_place} was slow at the same place: it may be the work there, and not the node"
    return word


def _has_spare(state: State, node: str) -> bool:
    left = replace(state, nodes=tuple(each for each in state.nodes if each != node))
    return len(places(left)) >= len(state.launched)


def at_commit(state: State, at: float, policy: Policy) -> Decision | None:
    """A checkpoint is there: put a spare in the place of a slow node, if that is wanted and one is there."""
    node = state.to_replace
    if not node or state.phase is not Phase.TRAINING or node not in state.launched or not _has_spare(state, node):
        return None
    state = replace(state, to_replace="")
    return leave_on_suspicion(state, at, node, f"{node} is slow: a spare takes its place", policy)


def watch_pace(state: State, policy: Policy) -> Decision:
    """Compare the launch with those before it, once its own pace is known."""
    if state.paced or len(state.pace.recent) < usual.WORDS:
        return Decision(state)
    seconds = statistics.median(state.pace.recent)
    known, slower = usual.stepped(state.usual, len(state.launched), seconds, policy)
    if slower is None:
        return Decision(replace(state, usual=known, paced=True))
    suspects, said = _suspects(state)
    if not suspects and not state.stragglers.slowest[0] and len(state.pace.recent) < 2 * usual.WORDS:
        return Decision(state)  # what the nodes take will soon be known, and may name the one that is slow
    state = replace(state, usual=known, paced=True)
    why = (
        f"this launch steps slower than those before it: {slower.seconds:.4g} s a step, and {slower.usual:.4g} s in "
        f"{slower.launches} of them; {said}"
    )
    tell = do.TellSlowLaunch(seconds=round(slower.seconds, 6), usual=slower.usual, nodes=suspects, why=why)
    return Decision(state, (tell,), why)


def _suspects(state: State) -> tuple[tuple[str, ...], str]:
    """Return the nodes that may be why: those that are new in this launch, else the slowest."""
    new = tuple(node for node in state.launched if node not in state.launched_before)
    if new and len(new) < len(state.launched):
        more = f" and {len(new) - NAMED_MAX} others" if len(new) > NAMED_MAX else ""
        return new, f"new in it: {', '.join(new[:NAMED_MAX])}{more}"
    node, slow = state.stragglers.slowest
    if node in state.launched and slow.factor >= SLOWEST_LEAST:
        said = f"the slowest node is {node}: {slow.factor:.2f} times as long as the others"
        return (node,), said + (f", for the data of rank {slow.rank}" if slow.loading_s is not None else "")
    return (), "all its nodes are new" if new else "no node of it stands out"
