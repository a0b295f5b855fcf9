"""Which nodes of an allocation train.  Pure.

Nodes of the launch before come first.  Where Slurm knows switches or blocks, the first launch gets nodes that are close
to each other.  A node that is left is replaced by the spare closest to it, which takes its place among the ranks, so
that neighbours stay neighbours.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from msgspec.structs import replace

from stepkeeper.core.reasons import NodesLeft
from stepkeeper.core.state import State

Switches = Mapping[str, str]  # what is above each node, the highest first: `core.leaf3`; a node without is not known


def places(state: State) -> tuple[str, ...]:
    """Return the nodes of the next launch, in the order of its ranks; none where too few are left.

    Nodes of the launch before come first, spares fill up: each takes the place of the node that it replaces, where
    Slurm knows switches and the ranks are ours to order.  Else the order is the allocation's.  Where no other number
    of ranks than that of the save can resume from the checkpoint, a launch has as many nodes as the one before.
    """
    before, switches, wanted = state.launch.nodes, state.nodes.switches, state.nodes.wanted
    if state.resume.same_world and state.launch.nodes:
        wanted = len(state.launch.nodes)
    if len(state.nodes.usable) < wanted:
        wanted = _fewer(state, len(state.nodes.usable))
    known = frozenset(before)
    again = [node for node in state.nodes.usable if node in known]
    if not again or len(again) > wanted:
        return close_nodes(again or state.nodes.usable, wanted, switches)
    kept = frozenset(again)
    spares = [node for node in state.nodes.usable if node not in known]
    found = replacements([node for node in before if node not in kept], spares, switches)
    if switches and state.identity.wrapped and wanted == len(before):
        return tuple(found.get(node, node) for node in before)
    chosen = {*again, *list(found.values())[: wanted - len(again)]}
    more = closest(again, [spare for spare in spares if spare not in chosen], switches)
    chosen |= set(more[: wanted - len(chosen)])
    return tuple(node for node in state.nodes.usable if node in chosen)


def without_nodes(state: State, left: Collection[str]) -> State:
    """Return the state in which a launch gets none of these nodes."""
    usable = tuple(node for node in state.nodes.usable if node not in left)
    return replace(state, nodes=replace(state.nodes, usable=usable))


def _fewer(state: State, left: int) -> int:
    """Return how many of so many nodes a smaller launch has; 0 where it may not be so small."""
    if state.resume.same_world or not 0 < state.nodes.min <= left:
        return 0
    return largest(state.nodes.counts, state.nodes.min, left)


def largest(counts: Sequence[int], least: int, most: int) -> int:
    """Return the largest number of nodes within bounds that a launch may have; 0 where there is none.

    >>> largest((1, 2, 4, 8), 2, 7)
    4
    >>> largest((), 2, 7)
    7
    """
    return most if not counts else max((each for each in counts if least <= each <= most), default=0)


def room(state: State) -> NodesLeft:
    """Tell how many nodes are left, and how many a launch needs."""
    counts = state.nodes.counts
    return NodesLeft(
        usable=len(state.nodes.usable),
        wanted=state.nodes.wanted,
        least=state.nodes.min,
        counts=counts,
        same_world=state.resume.same_world,
    )


# --- by switches ----------------------------------------------------------------------------------


def close_nodes(nodes: Sequence[str], wanted: int, switches: Switches) -> tuple[str, ...]:
    """Return so many of the nodes, in their order; the others are spares.  None are wanted where too few are left.

    Switches with fewer nodes than there are spares are not used at all; the other spares come one by one from
    the switch with the most nodes, so that no switch is used for one node if that is possible.
    """
    chosen = list(nodes) if wanted else []
    levels = max((len(_path(node, switches)) for node in chosen), default=0)
    for level in range(1, levels + 1):
        smallest = _smallest(chosen, level, switches)
        while len(smallest) <= len(chosen) - wanted:
            unused = frozenset(smallest)
            chosen = [node for node in chosen if node not in unused]
            smallest = _smallest(chosen, level, switches)
    while len(chosen) > wanted:
        chosen.remove(max(reversed(_groups(chosen, levels, switches)), key=len)[-1])
    return tuple(chosen)


def replacements(missing: Sequence[str], spares: Sequence[str], switches: Switches) -> dict[str, str]:
    """Return a spare for each missing node, as far as there are enough: the closest pairs come first."""
    pairs = [(-len(common(node, spare, switches)), node, spare) for node in missing for spare in spares]
    found: dict[str, str] = {}
    taken: set[str] = set()
    for _, node, spare in sorted(pairs, key=lambda pair: pair[0]):
        if node not in found and spare not in taken:
            found[node] = spare
            taken.add(spare)
    return found


def closest(nodes: Sequence[str], spares: Sequence[str], switches: Switches) -> list[str]:
    """Return spares, those first that are closest to any of the nodes."""
    return sorted(spares, key=lambda spare: -max(len(common(node, spare, switches)) for node in nodes))


def common(one: str, other: str, switches: Switches) -> tuple[str, ...]:
    """Return the switches that two nodes have in common, the highest first."""
    ours, theirs = _path(one, switches), _path(other, switches)
    same = next((level for level, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), None)
    return ours[: min(len(ours), len(theirs)) if same is None else same]


def _path(node: str, switches: Switches) -> tuple[str, ...]:
    return tuple(part for part in switches.get(node, "").split(".") if part)


def _groups(nodes: Sequence[str], level: int, switches: Switches) -> list[list[str]]:
    """Return the nodes by their switch at a level, counted from the highest."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for node in nodes:
        groups.setdefault(_path(node, switches)[:level], []).append(node)
    return list(groups.values())


def _smallest(nodes: Sequence[str], level: int, switches: Switches) -> list[str]:
    return min(reversed(_groups(nodes, level, switches)), key=len)
