"""What each tier of a run has: for people, and for programs that ask.

Which step to resume from, when several tiers have some, and how it comes back to where ranks read it.

Which steps stay in the cold tier: its newest, and what is pinned.  All in it are whole: they were read back.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from stepkeeper_trainer.formats.manifest import PENDING_NAME, ManifestError, parse_step_name
from stepkeeper_trainer.formats.verify import Cache, known_right, verify
from stepkeeper_trainer.tiers.cold import BOARD
from stepkeeper_trainer.tiers.copying import Pace, copy_step
from stepkeeper_trainer.tiers.directory import DirectoryTier
from stepkeeper_trainer.tiers.tier import Held, Tier, TierError

Kind = Literal["memory", "local", "shared", "cold"]
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
    state: State = "complete" if len(there) == len(files) else "part" if kind in {"memory", "local"} else "damaged"
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


@dataclass(frozen=True, slots=True)
class Newest:
    """The newest verified step of all tiers, in the tier from which ranks read; None where there is none."""

    directory: str | None
    held: Held | None
    came_from: str | None  # name of the tier that had it
    passed_over: tuple[str, ...] = ()  # what was wrong with newer ones, and with tiers that did not answer


def newest_anywhere(
    home: Tier,
    others: Sequence[Tier],
    *,
    counts: Callable[[Held], bool] = lambda _held: True,
    pace: Pace | None = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> Newest:
    """Find the newest step that is whole in any tier, and bring it into `home` if it is not there.

    The same save in several tiers is one step: it is taken from the first tier where it is whole, `home` first, then
    in the order of `others`.  Every byte is checked, in place or on its way.  A damaged or unreachable copy is passed
    over and told; nothing is removed.

    `counts` says whether a step is on the run's lineage, where tiers do not know of a rollback.
    """
    passed_over: list[str] = []
    damaged: set[str] = set()  # directories of `home`
    tiers = [home, *others]
    candidates: list[tuple[tuple[int, str], int, Held]] = []
    for number, tier in enumerate(tiers):
        try:
            held_here = tier.steps()
        except (TierError, OSError) as error:
            passed_over.append(f"{tier.name}: {error}")
            continue
        candidates += [
            ((held.manifest.step, held.manifest.created_at), number, held) for held in held_here if counts(held)
        ]
    candidates.sort(key=lambda candidate: (candidate[0], -candidate[1]), reverse=True)
    for _, number, held in candidates:
        try:
            if number == 0:
                problems = home.problems(held, deep=True)
                if not problems:
                    return Newest(held.directory, held, home.name, tuple(passed_over))
                damaged.add(held.directory)
                passed_over.append(f"{home.name}/{held.directory}: {problems[0]}")
                continue
            pushed = copy_step(tiers[number], held, home, pace=pace, should_stop=should_stop, despite=damaged)
        except (TierError, OSError) as error:
            passed_over.append(f"{tiers[number].name}/{held.directory}: {error}")
            if should_stop():
                break
            continue
        assert pushed.directory is not None, "a copy that is committed has a name"
        return Newest(pushed.directory, held, tiers[number].name, tuple(passed_over))
    return Newest(None, None, None, tuple(passed_over))


def superfluous(steps: list[Held], *, keep: int | None, pinned: Collection[str]) -> list[Held]:
    """Return what goes: `steps` are all of a tier, newest first; None keeps all."""
    if keep is None:
        return []
    return [held for held in steps[keep:] if held.manifest.save_id not in pinned]


def prune(tier: Tier, *, keep: int | None, pinned: Collection[str]) -> list[str]:
    """Remove what is superfluous, oldest first, and what a kill has left of steps before the newest; return the names.

    Only while this run has nothing on its way there.  The newest step is looked at before anything older goes: where a
    file of it is missing, everything stays.

    Raises:
        TierError, OSError: the tier does not answer.
    """
    steps = tier.steps()
    if not steps or tier.problems(steps[0], deep=False):
        return []
    gone = superfluous(steps, keep=keep, pinned=pinned)
    removed = tier.sweep(steps)
    for held in reversed(gone):
        tier.remove(held)
        removed.append(held.directory)
    return removed
