"""Which nodes a launch gets.  Pure."""

from __future__ import annotations

from collections.abc import Sequence

from stepkeeper.core.reasons import NodesLeft
from stepkeeper.core.state import State


def places(state: State) -> tuple[str, ...]:
    """Return the nodes of the next launch, in the allocation's order; none where too few are left.

    Nodes of the launch before come first, spares fill up.
    """
    wanted = state.nodes_wanted
    if len(state.nodes) < wanted:
        wanted = _fewer(state, len(state.nodes))
    again = [node for node in state.launched if node in state.nodes][:wanted]
    spares = [node for node in state.nodes if node not in again]
    chosen = {*again, *spares[: wanted - len(again)]}
    return tuple(node for node in state.nodes if node in chosen)


def _fewer(state: State, left: int) -> int:
    """Return how many of so many nodes a smaller launch has; 0 where it may not be so small."""
    if not 0 < state.nodes_min <= left:
        return 0
    return largest(state.node_counts, state.nodes_min, left)


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
    counts = state.node_counts
    return NodesLeft(usable=len(state.nodes), wanted=state.nodes_wanted, least=state.nodes_min, counts=counts)
