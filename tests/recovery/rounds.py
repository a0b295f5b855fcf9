"""Rounds of the benchmark of recoveries, kept as data: a page shows the newest three, and a round is one run.

A round takes half an hour and wants a machine with no other work, so three of one page may be of several days.  Ratios
compare what one round has played.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

import msgspec

from tests.recovery.playing import Outcome

DIRECTORY = Path(__file__).with_name("rounds")
SHOWN = 3


class Round(msgspec.Struct, frozen=True, kw_only=True):
    """What one run of all ways and faults has found."""

    at: str
    """When it began: `2026-11-27 19:30`."""
    cores: int
    load: float
    """The load average before it."""
    versions: dict[str, str]
    """Package to version: torch, and the other ways'."""
    outcomes: list[Outcome]
    pieces: dict[str, dict[str, dict[str, float]]]
    """What came before, way, piece: seconds."""

    def seconds(self, way: str, fault: str) -> float | None:
        """Return how long one way took; None where it was not played or does not recover."""
        own = [each.seconds for each in self.outcomes if (each.way, each.fault) == (way, fault)]
        found = [seconds for seconds in own if seconds is not None]
        return statistics.median(found) if found else None

    def keep(self, kind: str) -> Path:
        """Write it down; return where."""
        DIRECTORY.mkdir(exist_ok=True)
        path = DIRECTORY / f"{kind}-{self.at.replace(' ', '-').replace(':', '')}.json"
        path.write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n")
        return path


def newest(kind: str) -> list[Round]:
    """Return the rounds that a page shows, in their order."""
    paths = sorted(DIRECTORY.glob(f"{kind}-*.json"))[-SHOWN:]
    return [msgspec.json.decode(path.read_bytes(), type=Round) for path in paths]


def table(rounds: Sequence[Round]) -> str:
    """Say when and where each was played."""
    names = list(dict.fromkeys(name for each in rounds for name in each.versions))
    lines = ["| round | cores | load before | " + " | ".join(names) + " |", "|---" * (3 + len(names)) + "|"]
    for each in rounds:
        versions = " | ".join(each.versions.get(name, "") for name in names)
        lines.append(f"| {each.at} | {each.cores} | {each.load:.1f} | {versions} |")
    return "\n".join(lines)
