"""Which nodes of an allocation train, where Slurm knows their switches or blocks.  Pure.

The first launch gets nodes that are close to each other.  A node that is left is replaced by the spare closest to it,
which takes its place among the ranks, so that neighbours stay neighbours.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

Switches = Mapping[str, str]  # what is above each node, the highest first: `core.leaf3`; a node without is not known


def above(address: str, node: str) -> str:
    """Return the switches or blocks of SLURM_TOPOLOGY_ADDR; empty where Slurm knows none, or of another node.

    >>> above("core.leaf3.n7", "n7"), above("block2.n7", "n7")
    ('core.leaf3', 'block2')
    >>> above("n7", "n7"), above("core.leaf3.n8", "n7")
    ('', '')
    """
    return address.removesuffix(f".{node}") if address.endswith(f".{node}") else ""


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
            chosen = [node for node in chosen if node not in smallest]
            smallest = _smallest(chosen, level, switches)
    while len(chosen) > wanted:
        chosen.remove(max(reversed(_groups(chosen, levels, switches)), key=len)[-1])
    return tuple(chosen)


def replacements(missing: Sequence[str], spares: Sequence[str], switches: Switches) -> dict[str, str]:
    """Return a spare for each missing node, as far as there are enough: the closest pairs come first."""
    pairs = [(-len(common(node, spare, switches)), node, spare) for node in missing for spare in spares]
    found: dict[str, str] = {}
    for _, node, spare in sorted(pairs, key=lambda pair: pair[0]):
        if node not in found and spare not in found.values():
            found[node] = spare
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
