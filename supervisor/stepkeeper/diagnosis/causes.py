"""The words of a verdict: causes, roles, planes, evidence.  Pure."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from stepkeeper.core.causes import Cause

__all__ = ["Cause", "Evidence", "Otherwise", "Plane", "Role", "Verdict"]


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
