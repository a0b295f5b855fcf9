"""The checkpoints of a directory, newest first, each with its verdict; and the newest one to resume from."""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import msgspec

from stepkeeper.frameworks.first_sight import FirstSight
from stepkeeper.frameworks.framework import Contents, Framework, Resume, Step, WorldChange
from stepkeeper.frameworks.tree import TreeError
from stepkeeper.frameworks.verify import Deep, verify
from stepkeeper_trainer.formats.reading import Reading

CLOCKS_WITHIN_S = 5.0  # of this node and of those that wrote
QUARANTINED = ".corrupt-"
"""How names of checkpoints begin that were put aside: they are listed no more."""


class State(Enum):
    """What is known of a checkpoint."""

    VERIFIED = "verified"
    COMPLETE = "complete, not yet verified"
    NOT_RESUMABLE = "complete, and not resumable"
    UNSETTLED = "incomplete, and changed just now: perhaps still being written"
    TORN = "damaged or incomplete"

    @property
    def chosen_from(self) -> bool:
        """Whether a training may resume from it."""
        return self in (State.VERIFIED, State.COMPLETE)


@dataclass(frozen=True, slots=True)
class Judged:
    """One checkpoint, and what was found."""

    step: Step
    number: int | None
    state: State
    problems: tuple[str, ...]
    notes: tuple[str, ...]
    contents: Contents | None
    deep: Deep | None = None
    resume: Resume | None = None
    finished: bool | None = None
    world_change: WorldChange | None = None

    @property
    def bytes(self) -> int | None:
        """Return the size of its parts."""
        if self.contents is None:
            return None
        files = self.contents.tree.files
        return sum(files[name].st_size for name in self.contents.parts if name in files)


class Launched(msgspec.Struct, frozen=True, kw_only=True):
    """A launch: what was written since it began, and before the next one, is by its ranks."""

    at: float  # Unix seconds
    ranks: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class How:
    """How checkpoints are judged."""

    environment: Mapping[str, str]
    deep: bool
    cached: bool
    world_size: int | None  # None: by `launched`, where that tells it
    reading: Reading
    launched: tuple[Launched, ...] = ()  # the oldest first

    def shallow(self) -> How:
        """Return the same without reading tensors."""
        return dataclasses.replace(self, deep=False)


def judge(framework: Framework, step: Step, how: How) -> Judged:
    """Judge one checkpoint.  Raises OSError where it is gone or cannot be listed."""
    try:
        contents = framework.complete(step, world_size=_ranks(step, how))
    except TreeError as error:
        return Judged(step, step.number, State.TORN, (str(error),), (), None)
    number = contents.number if contents.number is not None else step.number
    if contents.problems:
        state = State.TORN if contents.tree.quiet() else State.UNSETTLED
        return Judged(step, number, state, tuple(contents.problems), tuple(contents.notes), contents)
    deep = None
    notes = list(contents.notes)
    if how.deep:
        deep = verify(contents, how.reading, FirstSight(how.environment), cached=how.cached)
        notes += [note for note in deep.notes if note not in notes]
        if deep.problems:
            return Judged(step, number, State.TORN, deep.problems, tuple(notes), contents, deep)
    if contents.not_resumable:
        return Judged(step, number, State.NOT_RESUMABLE, (contents.not_resumable,), tuple(notes), contents, deep)
    state = State.VERIFIED if how.deep else State.COMPLETE
    resume = framework.resume(contents)
    finished = None if contents.number is None or contents.target is None else contents.number >= contents.target
    change = contents.world_change or framework.world_change
    return Judged(step, number, state, (), tuple(notes), contents, deep, resume, finished, change)


def _ranks(step: Step, how: How) -> int | None:
    """Return how many ranks saved a checkpoint: those of the launch that was under way then.  Raises OSError."""
    if how.world_size is not None or not how.launched:
        return how.world_size
    at = os.stat(step.path).st_mtime
    found = {_ranks_at(how.launched, at + skew) for skew in (-CLOCKS_WITHIN_S, CLOCKS_WITHIN_S)}
    return found.pop() if len(found) == 1 else None


def _ranks_at(launched: tuple[Launched, ...], at: float) -> int | None:
    return next((each.ranks for each in reversed(launched) if each.at <= at), None)


def judge_all(framework: Framework, root: Path, how: How) -> list[Judged]:
    """Judge every checkpoint of a directory, newest first.  Raises OSError."""
    steps = [step for step in framework.list_steps(root) if not step.path.name.startswith(QUARANTINED)]
    return _newest_first([each for step in steps if (each := _if_there(framework, step, how))])


def judge_by_name(framework: Framework, root: Path, how: How) -> Iterator[Judged]:
    """Judge one checkpoint after the other, the highest step first by their names; all, where a name has no step.

    Raises:
        OSError: the directory cannot be listed.
    """
    steps = [step for step in framework.list_steps(root) if not step.path.name.startswith(QUARANTINED)]
    if any(step.number is None for step in steps):
        yield from judge_all(framework, root, how)
        return
    for _, same in itertools.groupby(sorted(steps, key=_number, reverse=True), key=_number):
        yield from _newest_first([each for step in same if (each := _if_there(framework, step, how))])


def _number(step: Step) -> int:
    return -1 if step.number is None else step.number


def _if_there(framework: Framework, step: Step, how: How) -> Judged | None:
    try:
        return judge(framework, step, how)
    except FileNotFoundError:
        return None  # retention has removed it meanwhile
    except Exception as error:  # noqa: BLE001 - one that an adapter cannot judge does not hide the others
        shown = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) else repr(error)
        return Judged(step, step.number, State.TORN, (f"cannot be judged: {shown}",), (), None)


def _newest_first(judged: list[Judged]) -> list[Judged]:
    def key(each: Judged) -> tuple[int, float, str]:
        changed_at = each.contents.tree.changed_at() if each.contents is not None else 0.0
        return (-1 if each.number is None else each.number, changed_at, each.step.path.name)

    return sorted(judged, key=key, reverse=True)


def newest(
    framework: Framework,
    root: Path,
    how: How,
    *,
    left_out: Callable[[Judged], bool] = lambda _: False,
    by_name: bool = False,
) -> tuple[Judged | None, list[Judged]]:
    """Choose the newest checkpoint that is whole and resumable; also return those that were passed over.

    Bytes are read of one checkpoint after the other, the newest first, until one is right.

    Args:
        framework: that wrote them.
        root: where they are.
        how: they are judged.
        left_out: names those that do not count, and are in no answer.
        by_name: the steps in their names order them, so that older ones need not be judged.

    Raises:
        OSError: the directory cannot be listed.
    """
    skipped: list[Judged] = []
    for each in (judge_by_name if by_name else judge_all)(framework, root, how.shallow()):
        if left_out(each):
            continue
        found: Judged | None = each
        if each.state.chosen_from and how.deep:
            found = _if_there(framework, each.step, how)
        if found is None:
            continue
        if found.state.chosen_from:
            return found, skipped
        skipped.append(found)
    return None, skipped
