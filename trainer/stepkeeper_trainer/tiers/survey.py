"""What each tier of a run has: for people, and for programs that ask."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from stepkeeper_trainer.formats.cache import Cache
from stepkeeper_trainer.formats.manifest import PENDING_NAME, ManifestError
from stepkeeper_trainer.formats.names import parse_step_name
from stepkeeper_trainer.formats.verify import known_right, verify
from stepkeeper_trainer.tiers.cold import BOARD
from stepkeeper_trainer.tiers.directory import DirectoryTier
from stepkeeper_trainer.tiers.tier import Held, Tier, TierError

Kind = Literal["local", "shared", "cold"]
State = Literal["verified", "complete", "part", "damaged"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """A step in one tier."""

    step: int
    save_id: str
    directory: str
    files: int  # that are there
    of: int
    state: State
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Surveyed:
    """One tier; `error` says why nothing is known."""

    kind: Kind
    name: str
    steps: tuple[Copy, ...] = ()
    error: str = ""

    @property
    def newest(self) -> int | None:
        """The newest step that is there as a whole."""
        return max((copy.step for copy in self.steps if copy.state in {"verified", "complete"}), default=None)


@dataclass(slots=True)
class OnTheWay:
    """Copies in flight, as the run's directory shows them."""

    to_shared: list[str] = field(default_factory=list)
    to_cold: list[str] = field(default_factory=list)


def survey(kind: Kind, tier: Tier, *, deep: bool, tell: Callable[[str], object] = lambda _what: None) -> Surveyed:
    """Look at one tier; with `deep` every byte is read.  A tier that does not answer is an answer too."""
    copies = []
    try:
        for held in _steps(kind, tier):
            tell(f"{tier.name}/{held.directory}")
            copies.append(_copy(kind, tier, held, deep=deep))
    except (TierError, OSError) as error:
        return Surveyed(kind=kind, name=tier.name, steps=tuple(copies), error=str(error))
    return Surveyed(kind=kind, name=tier.name, steps=tuple(copies))


def _steps(kind: Kind, tier: Tier) -> Iterable[Held]:
    if kind == "cold" or not isinstance(tier, DirectoryTier):
        return tier.steps()
    found = []
    if tier.checkpoints.is_dir():
        for name in os.listdir(tier.checkpoints):
            if parse_step_name(name) is not None:
                try:
                    found.append(tier.held(name))
                except ManifestError:
                    continue  # `checkpoints ls` tells of those
    return sorted(found, key=lambda held: (held.manifest.step, held.manifest.created_at), reverse=True)


def _copy(kind: Kind, tier: Tier, held: Held, *, deep: bool) -> Copy:
    files = held.manifest.files
    there = [name for name, entry in files.items() if tier.has_file(held, name, entry)]
    state: State = "complete" if len(there) == len(files) else "part" if kind == "local" else "damaged"
    problem = "" if state != "damaged" else f"{len(files) - len(there)} files are missing or of another size"
    if state == "complete":
        problems, known = _problems(tier, held, deep=deep)
        if problems:
            state, problem = "damaged", problems[0]
        elif known:
            state = "verified"
    return Copy(
        step=held.manifest.step,
        save_id=held.manifest.save_id,
        directory=held.directory,
        files=len(there),
        of=len(files),
        state=state,
        problem=problem,
    )


def _problems(tier: Tier, held: Held, *, deep: bool) -> tuple[list[str], bool]:
    """Return what is wrong, and whether every byte is known to be right."""
    if isinstance(tier, DirectoryTier):
        directory = tier.checkpoints / held.directory
        cache = Cache(tier.checkpoints)
        problems = list(verify(directory, deep=deep, cache=cache).problems)
        return problems, not problems and (deep or known_right(directory, cache))
    problems = tier.problems(held, deep=deep)
    return problems, deep and not problems


def on_the_way(checkpoints: Path) -> OnTheWay:
    """Return which copies are in flight, by what stands beside the step directories.  Raises OSError."""
    found = OnTheWay()
    for entry in os.scandir(checkpoints):
        if entry.name.startswith(BOARD):
            found.to_cold.append(entry.name.removeprefix(BOARD))
        elif os.path.exists(os.path.join(entry.path, PENDING_NAME)):
            found.to_shared.append(entry.name.removeprefix(".tmp-"))
    return found
