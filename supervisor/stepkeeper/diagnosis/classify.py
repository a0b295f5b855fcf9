"""Causes, roles and planes; evidence of all planes -> one verdict.

Pure and deterministic: the order in which evidence comes does not matter.

1. Roots beat cascades, cascades beat confirmations: a collective's timeout is the verdict where no rank says more.
2. A weak root (below `LIKELY`) gives way to any other.
3. A fault of a node is the verdict where it explains what the ranks say; an error of the program's own, it does not.
4. Slurm's word is last: it is the verdict where it alone says why, or where it came before any rank failed.
5. Of several roots, that of the rank that failed first; in one log the more certain one, then the earlier one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from enum import StrEnum

import msgspec

from stepkeeper.core.causes import Cause


class Role(StrEnum):
    """What a piece of evidence is worth."""

    ROOT = "root"  # says what went wrong
    CASCADE = "cascade"  # follows from what went wrong elsewhere
    CONFIRMATION = "confirmation"  # says that something went wrong, or supports a root


class Plane(StrEnum):
    """Who says so."""

    APPLICATION = "application"
    NODE = "node"
    SLURM = "slurm"


class Evidence(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One observation, and what a rule takes it for."""

    plane: Plane
    rule: str
    cause: Cause
    role: Role
    confidence: float  # that `cause` is the cause, were this all we knew
    text: str  # what was seen, shortened
    rank: int | None = None
    node: str = ""
    at: float | None = None  # Unix seconds
    line: int | None = None  # of the log, from 1
    location: str = ""  # `ValueError at train.py:61 in main`
    count: int = 1  # how often the same rule matched for this rank
    pid: int | None = None
    gpu: str = ""  # as the line names it: an index, or `PCI:0000:3b:00`
    log: str = ""  # the file that `line` is of


class Otherwise(msgspec.Struct, frozen=True, kw_only=True):
    """What would have been decided without the strongest piece of evidence."""

    cause: Cause
    rule: str
    confidence: float


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """Why a launch ended, as far as the evidence shows."""

    cause: Cause
    rule: str  # `no-evidence` where nothing matched
    confidence: float
    role: Role  # `cascade`: the root itself was not seen
    evidence: tuple[Evidence, ...]  # the strongest first
    location: str = ""
    rank: int | None = None  # that failed first, where that is known
    node: str = ""
    otherwise: Otherwise | None = None


LIKELY = 0.6
SURE = 0.85
KEPT_MAX = 20  # pieces of evidence in a verdict
REPORTED_FROM = 0.5  # of this confidence on, what is seen is reported though it names no cause
CONFIRMED_SHARE = 0.3  # of the doubt that independent evidence takes away
CONTESTED_SHARE = 0.85  # of the confidence that is left where another root says something else
NO_EVIDENCE = "no-evidence"

EXPLAINED_BY_NODE = frozenset(
    {
        Cause.NODE_FAULT,
        Cause.NODE_LOST,
        Cause.NETWORK,
        Cause.COLLECTIVE_TIMEOUT,
        Cause.HANG,
        Cause.SEGFAULT,
        Cause.CANCELLED,
        Cause.HOST_MEMORY,
        Cause.UNKNOWN,
    }
)
"""What ranks say when the hardware below them fails.  A CUDA error is explained too: see `_by_node`."""

_CUDA_RULES = frozenset({"cuda-program-error", "cuda-library-error", "cuda-broken"})
_BY_SLURM = frozenset({Cause.PREEMPTED, Cause.TIME_LIMIT, Cause.CANCELLED, Cause.NODE_LOST, Cause.HOST_MEMORY})
_ROLES = {Role.ROOT: 0, Role.CASCADE: 1, Role.CONFIRMATION: 2}
_PLANES = {Plane.NODE: 0, Plane.APPLICATION: 1, Plane.SLURM: 2}


def classify(evidence: Iterable[Evidence]) -> Verdict:
    """Return why a launch ended."""
    pieces = _ordered(evidence)
    strongest = _strongest(pieces)
    if strongest is None:
        seen = max(pieces, key=lambda each: each.confidence, default=None)
        known = seen if seen is not None and seen.confidence >= REPORTED_FROM and seen.cause is Cause.UNKNOWN else None
        rest = [each for each in pieces if each is not known]
        return Verdict(
            cause=Cause.UNKNOWN,
            rule=known.rule if known is not None else NO_EVIDENCE,
            confidence=0.0,
            role=Role.CONFIRMATION,
            evidence=(*((known,) if known is not None else ()), *rest)[:KEPT_MAX],
            node=known.node if known is not None else "",
        )
    rest = [each for each in pieces if each is not strongest]
    second = _strongest(rest)
    rank, node = _who(strongest, rest)
    return Verdict(
        cause=strongest.cause,
        rule=strongest.rule,
        confidence=_confidence(strongest, rest),
        role=strongest.role,
        evidence=(strongest, *sorted(rest, key=lambda each: each.cause is not strongest.cause)[: KEPT_MAX - 1]),
        location=strongest.location or _location(strongest, rest),
        rank=rank,
        node=node,
        otherwise=Otherwise(
            cause=second.cause if second else Cause.UNKNOWN,
            rule=second.rule if second else NO_EVIDENCE,
            confidence=_confidence(second, [each for each in rest if each is not second]) if second else 0.0,
        ),
    )


def _ordered(evidence: Iterable[Evidence]) -> list[Evidence]:
    """Return the evidence by role, time of its rank's end, strength, place: the same for any order it comes in."""
    pieces = list(evidence)
    ended: dict[int, float] = {}
    for each in pieces:
        if each.rank is not None and each.at is not None and each.plane is Plane.APPLICATION:
            ended[each.rank] = min(each.at, ended.get(each.rank, math.inf))

    def key(each: Evidence) -> tuple[object, ...]:
        of_rank = ended.get(each.rank, math.inf) if each.rank is not None else math.inf
        at = of_rank if each.plane is Plane.APPLICATION else (each.at if each.at is not None else math.inf)
        return (
            _ROLES[each.role],
            each.confidence < LIKELY,
            at,
            each.confidence < SURE,
            _PLANES[each.plane],
            each.line if each.line is not None else math.inf,
            -each.confidence,
            each.rank if each.rank is not None else -1,
            each.node,
            each.rule,
            each.text,
            each.cause,
            each.at if each.at is not None else math.inf,
            each.location,
            each.count,
            (each.log, each.pid or 0, each.gpu),
        )

    return sorted(pieces, key=key)


def _strongest(pieces: Sequence[Evidence]) -> Evidence | None:
    """Return the piece that decides, of ordered ones."""
    failures = [each for each in pieces if each.cause is not Cause.FINISHED and each.cause is not Cause.UNKNOWN]
    roots = [each for each in failures if each.role is Role.ROOT and each.confidence >= LIKELY]
    application = next((each for each in roots if each.plane is Plane.APPLICATION), None)
    node = next((each for each in roots if each.plane is Plane.NODE), None)
    slurm = next((each for each in roots if each.plane is Plane.SLURM), None)
    if node is not None and (application is None or _by_node(node, application)):
        return node
    if slurm is not None and (application is None or _by_slurm(slurm, application, pieces)):
        return slurm
    if application is not None:
        return application
    weak = [each for each in failures if each.role is Role.ROOT]
    followed = [each for each in failures if each.role is Role.CASCADE]
    ended = [each for each in followed if each.cause is Cause.CANCELLED]  # to end: another one had failed
    followed = [each for each in followed if each.cause is not Cause.CANCELLED]
    if weak or followed:
        # a cascade that says much outweighs what a launcher says of many things
        return weak[0] if weak else max(followed, key=lambda each: (each.confidence, -followed.index(each)))
    finished = [each for each in pieces if each.cause is Cause.FINISHED]
    confirmed = [each for each in failures if each.role is Role.CONFIRMATION and each.confidence >= CONFIRMED_SHARE]
    if ended and not confirmed:
        return max(ended, key=lambda each: (each.confidence, -ended.index(each)))
    if confirmed and not finished:
        return confirmed[0]
    if finished and not confirmed:
        return max(finished, key=lambda each: each.confidence)
    return confirmed[0] if confirmed else None


def _by_node(node: Evidence, application: Evidence) -> bool:
    """Tell whether a fault of a node explains what a rank says.  A fault long after it does not."""
    if node.at is not None and application.at is not None and node.at > application.at + 600.0:
        return False
    if node.node and application.node and node.node != application.node:
        return application.cause in EXPLAINED_BY_NODE
    return application.cause in EXPLAINED_BY_NODE or application.rule in _CUDA_RULES


def _by_slurm(slurm: Evidence, application: Evidence, pieces: Sequence[Evidence]) -> bool:
    """Tell whether Slurm's word explains what a rank says: it came first, or the rank says nothing sure."""
    if slurm.cause is application.cause:
        return slurm.confidence >= application.confidence
    if slurm.at is not None and application.rank is not None:
        times = [each.at for each in pieces if each.rank == application.rank and each.at is not None]
        if times:
            return slurm.cause in _BY_SLURM and slurm.at <= min(times)
    if slurm.line is not None and application.line is not None and slurm.node == application.node:
        first = slurm.line < application.line
        return slurm.confidence >= SURE if first else slurm.confidence >= SURE > application.confidence
    return slurm.confidence >= SURE > application.confidence


def _confidence(strongest: Evidence, rest: Sequence[Evidence]) -> float:
    """Return the confidence of a verdict: independent evidence raises it, another root lowers it."""
    doubt = 1.0 - strongest.confidence
    if any(each.cause is strongest.cause and _is_independent(each, strongest) for each in rest):
        doubt *= 1.0 - CONFIRMED_SHARE
    confidence = 1.0 - doubt
    contested = any(
        each.role is Role.ROOT
        and each.confidence >= LIKELY
        and each.cause is not strongest.cause
        and each.cause is not Cause.FINISHED
        for each in rest
    )
    return round(confidence * (CONTESTED_SHARE if contested else 1.0), 3)


def _is_independent(each: Evidence, strongest: Evidence) -> bool:
    return each.rule != strongest.rule or each.plane is not strongest.plane


def _who(strongest: Evidence, rest: Sequence[Evidence]) -> tuple[int | None, str]:
    """Return the rank and the node of a verdict: where a root names neither, those that all others of its rule name."""
    if strongest.rank is not None or strongest.node or strongest.role is not Role.ROOT:
        return strongest.rank, strongest.node
    named = {(each.rank, each.node) for each in rest if each.rule == strongest.rule and each.node}
    return named.pop() if len(named) == 1 else (None, "")


def _location(strongest: Evidence, rest: Sequence[Evidence]) -> str:
    """Return where the same cause was located by another piece of the same rank."""
    same = (
        each.location
        for each in rest
        if each.location and each.rank == strongest.rank and each.cause is strongest.cause
    )
    return next(same, "")
