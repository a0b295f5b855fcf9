"""Which nodes hold the others up, by what each works itself for a step.  Pure.

In a synchronous training every rank's step takes equally long, so the ranks tell their own time apart from what they
wait for others.  A node is compared with the others of the same window, never with a fixed time, and counts as slow
when it has stayed so for long.  The windows leave out warm-up, evaluation and saves: the ranks see to that.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping

import msgspec
from msgspec.structs import replace

from stepkeeper.core.baseline import median_mad
from stepkeeper.core.policy import Policy

WINDOWS_LEAST = 4  # in which a node was slow, less those in which it was not
WINDOWS_MOST = 8  # that are counted: a node that keeps up again is cleared within as many
SHARE_LEAST = 0.1  # of a step that the node costs all others
SPREAD_FROM = 5  # nodes that have a spread
SIGMAS = 6.0
SPREAD_MAX = 700.0  # a logarithm: e to more than that is no float
PLACES_MAX = 16
MANY = 64  # nodes: the median of all is that of the others
LOADING_SHARE = 0.5  # of what a node takes longer: so much of it before the first forward, and it is the data


class Slow(msgspec.Struct, frozen=True, kw_only=True):
    """How slow a node was in a window."""

    factor: float = 1.0  # of the usual own time
    rank: int | None = None  # the slowest there
    loading_s: float | None = None  # it is because of its data, which it loads for so long; None: it is not
    usual_loading_s: float = 0.0


class Suspect(msgspec.Struct, frozen=True, kw_only=True):
    """A node that was slow in the newest windows."""

    node: str
    since: float  # Unix seconds
    windows: int = 1  # in which it was slow, less those in which it was not
    slow: Slow = Slow()  # in the newest window in which it was
    reported: bool = msgspec.field(default=False, name="told")


class Stragglers(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of the nodes of a launch."""

    suspects: tuple[Suspect, ...] = ()
    slowest: tuple[str, Slow] = ("", Slow())  # the node of the newest window
    places: tuple[tuple[int, str], ...] = ()  # of the run: (place among the nodes, the node that was slow there)


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """A node is slow, or keeps up again."""

    node: str
    slow: bool
    how: Slow
    since: float
    of_its_place: str = ""  # another node that was slow at the same place: then it is the work, not the node


def launched(stragglers: Stragglers) -> Stragglers:
    """Begin a launch: what was slow in the one before has to be slow again."""
    return Stragglers(places=stragglers.places)


def observe_pace(
    stragglers: Stragglers,
    nodes: tuple[str, ...],
    own: Mapping[str, float],
    *,
    at: float,
    step_seconds: float,
    policy: Policy,
    loading: float = 0.0,
    ranks: Mapping[str, tuple[int, float]] | None = None,
) -> tuple[Stragglers, tuple[Verdict, ...]]:
    """Take in a window; tell of nodes that have stayed slow, and of those that do no more.

    Args:
        stragglers: so far.
        nodes: of the launch, in their order.
        own: seconds that the ranks of each node worked themselves for a step.
        at: Unix seconds.
        step_seconds: that a step takes.
        policy: how much is too much, and for how long.
        loading: seconds of the own time in which a node usually loads data.
        ranks: of some nodes the slowest rank, and how long it loads data.
    """
    own = {node: own[node] for node in nodes if own.get(node, 0.0) > 0.0}
    if len(own) < 2:  # noqa: PLR2004 - nobody to compare with
        return stragglers, ()
    usual = _usual(own)
    found = {node: _slow(seconds, usual[node], (ranks or {}).get(node), loading) for node, seconds in own.items()}
    allowed = max(policy.slow_node_times, math.exp(min(SIGMAS * _spread(own), SPREAD_MAX)))
    least_s = SHARE_LEAST * step_seconds
    slow = {node: each for node, each in found.items() if each.factor > allowed and own[node] - usual[node] >= least_s}
    suspects, verdicts = [], []
    known = {suspect.node: suspect for suspect in stragglers.suspects}
    for node in nodes:
        suspect = _next(known.get(node), node, slow.get(node), at)
        if suspect is None:
            continue
        if suspect.windows == 0:
            verdicts += [_verdict(stragglers, nodes, suspect, slow=False)] if suspect.reported else []
            continue
        lasted = suspect.windows >= WINDOWS_LEAST and at - suspect.since >= policy.slow_node_for_s
        if lasted and not suspect.reported:
            verdicts.append(_verdict(stragglers, nodes, suspect, slow=True))
            suspect = replace(suspect, reported=True)
        suspects.append(suspect)
    slowest = max(found.items(), key=lambda item: item[1].factor)
    reported = tuple((nodes.index(each.node), each.node) for each in verdicts if each.slow)
    places = (*(place for place in stragglers.places if place not in reported), *reported)[-PLACES_MAX:]
    return Stragglers(suspects=tuple(suspects), slowest=slowest, places=places), tuple(verdicts)


def _slow(seconds: float, usual: float, rank: tuple[int, float] | None, loading: float) -> Slow:
    factor = seconds / usual
    if rank is None:
        return Slow(factor=factor)
    its_data = factor > 1 and rank[1] - loading >= LOADING_SHARE * (seconds - usual)
    return Slow(factor=factor, rank=rank[0], loading_s=rank[1] if its_data else None, usual_loading_s=loading)


def _usual(own: Mapping[str, float]) -> dict[str, float]:
    """Return for each node the median of the others' times."""
    if len(own) >= MANY:
        return dict.fromkeys(own, statistics.median(own.values()))
    return {node: statistics.median(own[other] for other in own if other != node) for node in own}


def _spread(own: Mapping[str, float]) -> float:
    """Return how far ordinary nodes lie apart: the sigma of the logarithms, robust; 0 where they are too few."""
    if len(own) < SPREAD_FROM:
        return 0.0
    _, sigma = median_mad([math.log(seconds) for seconds in own.values()])
    return sigma


def _next(before: Suspect | None, node: str, slow: Slow | None, at: float) -> Suspect | None:
    if slow is None:
        return replace(before, windows=before.windows - 1) if before is not None else None
    if before is None:
        return Suspect(node=node, since=at, slow=slow)
    return replace(before, windows=min(before.windows + 1, WINDOWS_MOST), slow=slow)


def _verdict(stragglers: Stragglers, nodes: tuple[str, ...], suspect: Suspect, *, slow: bool) -> Verdict:
    of_its_place = _of_its_place(stragglers, nodes, suspect.node)
    return Verdict(node=suspect.node, slow=slow, how=suspect.slow, since=suspect.since, of_its_place=of_its_place)


def _of_its_place(stragglers: Stragglers, nodes: tuple[str, ...], node: str) -> str:
    """Return another node that was slow at the same place, the newest; empty where there is none."""
    place = nodes.index(node)
    return next((each for at, each in reversed(stragglers.places) if at == place and each != node), "")


def to_replace(stragglers: Stragglers, nodes: tuple[str, ...]) -> str:
    """Return a node of a launch that was reported slow, is so still, and for no reason of its data or its place."""
    found = (
        each.node
        for each in reversed(stragglers.suspects)
        if each.reported and each.slow.loading_s is None and not _of_its_place(stragglers, nodes, each.node)
    )
    return next(found, "")
