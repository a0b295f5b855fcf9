"""The circuit breaker: how many nodes may be drained by Stepkeeper at once.  Counted in Slurm itself.  Pure.

What befalls many nodes at once is the fabric, the driver or a job: draining them all would help nobody.  Agents do
not talk to each other.  Each counts before it drains; two may pass together, so each counts again after its own
drain, and the later ones, by (time of the reason, name), give theirs back.
"""

from __future__ import annotations

from collections.abc import Sequence

from stepkeeper.node.core.policy import Policy
from stepkeeper.slurm.nodes import NodeFacts

HOUR_S = 3600.0


def limit(size: int, policy: Policy) -> int:
    """Return how many nodes of a partition of `size` nodes we may hold.

    >>> limit(4, Policy()), limit(100, Policy())
    (2, 5)
    """
    return max(policy.nodes_min, int(size * policy.nodes_share))


def refuses(node: NodeFacts, nodes: Sequence[NodeFacts], at: float, policy: Policy) -> str:
    """Say why one more drain, of `node`, would be too many; "" where it is not."""
    ours = [each for each in nodes if _is_held(each) and each.name != node.name]
    for partition in node.partitions:
        size, most = _size(partition, nodes, policy)
        held = sum(partition in each.partitions for each in ours)
        if held + 1 > most:
            return f"{held} of {size} nodes of partition {partition} are drained by Stepkeeper, and {most} may be"
    lately = sum(_is_recent(each, at) for each in ours)
    if lately + 1 > policy.drains_per_hour:
        return f"{lately} nodes were drained by Stepkeeper in the last hour, and {policy.drains_per_hour} may be"
    return ""


def gives_back(node: NodeFacts, nodes: Sequence[NodeFacts], at: float, policy: Policy) -> str:
    """Say why the drain of `node`, which has just been made, must be taken back; "" where it may stay."""
    ours = sorted((each for each in nodes if _is_held(each)), key=lambda each: (each.reason_at or 0.0, each.name))
    for partition in node.partitions:
        _, most = _size(partition, nodes, policy)
        place = [each.name for each in ours if partition in each.partitions].index(node.name)
        if place >= most:
            return f"{place} nodes of partition {partition} were drained before, and {most} may be"
    lately = [each.name for each in ours if _is_recent(each, at)]
    if node.name in lately and lately.index(node.name) >= policy.drains_per_hour:
        place = lately.index(node.name)
        return f"{place} nodes were drained in the last hour before, and {policy.drains_per_hour} may be"
    return ""


def _is_held(node: NodeFacts) -> bool:
    return node.ours and node.drained


def _is_recent(node: NodeFacts, at: float) -> bool:
    return node.reason_at is not None and node.reason_at > at - HOUR_S


def _size(partition: str, nodes: Sequence[NodeFacts], policy: Policy) -> tuple[int, int]:
    size = sum(partition in each.partitions for each in nodes)
    return size, limit(size, policy)
