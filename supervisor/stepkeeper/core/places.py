"""Which nodes a launch gets.  Pure."""

from __future__ import annotations

from stepkeeper.core.state import State


def places(state: State) -> tuple[str, ...]:
    """Return the nodes of the next launch, in the allocation's order; none where too few are left.

    Nodes of the launch before come first, spares fill up.
    """
    wanted = state.nodes_wanted
    if len(state.nodes) < wanted:
        enough = 0 < state.nodes_min <= len(state.nodes)
        return state.nodes if enough else ()
    again = [node for node in state.launched if node in state.nodes][:wanted]
    spares = [node for node in state.nodes if node not in again]
    chosen = {*again, *spares[: wanted - len(again)]}
    return tuple(node for node in state.nodes if node in chosen)


def room(state: State) -> str:
    """Say how many nodes are left, and how many a launch needs."""
    least = f", and at least {state.nodes_min}" if state.nodes_min else ""
    return f"{len(state.nodes)} usable nodes are left of the allocation, a launch wants {state.nodes_wanted}{least}"
