"""What an adapter of a framework must answer, and the records in which it answers."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Protocol

from stepkeeper.frameworks.script import Script
from stepkeeper.frameworks.tree import Tree


class Kind(Enum):
    """What can be verified in a file."""

    ARCHIVE = "torch.save archive"  # one CRC32 for each record
    ITEMS = "DCP file"  # one torch.save archive for each item
    SAFETENSORS = "safetensors"  # structure only: the format has no checksum
    PLAIN = "file"  # was parsed, or has no structure that can be checked


class WorldChange(Enum):
    """Whether another number of ranks can resume from a checkpoint."""

    YES = "any number of ranks"
    NO = "as many ranks as saved it"
    SCRIPT = "as the script loads it"


@dataclass(frozen=True, slots=True)
class Step:
    """One checkpoint as its name shows it; nothing in it was read."""

    path: Path  # a directory, or a single file
    number: int | None  # None: the name does not say it


@dataclass(frozen=True, slots=True)
class Part:
    """A file that belongs to a checkpoint."""

    name: str  # relative to the tree's root
    kind: Kind
    items: tuple[tuple[int, int], ...] = ()  # of a DCP file: start and length
    compressed: tuple[tuple[int, int], ...] = ()  # of a DCP file: items in frames of zstd
    sha256: str | None = None  # as the framework itself recorded it


@dataclass(slots=True)
class Contents:
    """What an adapter found in a checkpoint without reading tensors."""

    tree: Tree
    step: Step
    number: int | None
    world_size: int | None
    parts: dict[str, Part] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    keys: frozenset[str] = frozenset()  # top-level names of the state, where they were read
    not_resumable: str = ""  # why training cannot go on from it, although it is complete
    target: int | None = None  # the step at which the training ends, where the checkpoint says it
    world_change: WorldChange | None = None  # where this one differs from the others of its framework
    converted: bool = False  # made of another checkpoint: only a script that asks for such ones loads it

    def problem(self, text: str) -> None:
        """Record one thing that is wrong, once."""
        if text not in self.problems:
            self.problems.append(text)

    def note(self, text: str) -> None:
        """Record what a person should know, once."""
        if text not in self.notes:
            self.notes.append(text)


@dataclass(frozen=True, slots=True)
class Resume:
    """How the framework is made to resume from one checkpoint."""

    arguments: tuple[str, ...]  # for the command line; empty: there is none that every script takes
    how: str


@dataclass(frozen=True, slots=True)
class Writes:
    """How a script gets the directory of its checkpoints."""

    options: tuple[str, ...] = ()  # of the command line
    keywords: tuple[str, ...] = ()  # of calls in the script, the one that counts most first
    calls: tuple[str, ...] = ()  # whose first argument is the value of the first keyword
    default: str = ""  # below the working directory, where neither says it


# what scripts with a loop of their own call it
OWN_WRITES = Writes(
    (
        "--checkpoint_dir",
        "--checkpoints_dir",
        "--ckpt_dir",
        "--save_dir",
        "--output_dir",
        "--out_dir",
        "--project_dir",
    ),
    ("checkpoint_dir", "save_dir", "output_dir", "project_dir"),
)


POINTER_BYTES_MAX = 1024 * 1024  # no file that names a checkpoint is larger


class Framework(Protocol):
    """One framework.  `step_name` or `is_step`, and `look`, are an adapter's own; the rest follows in most."""

    name: str  # as `--framework` takes it
    title: str
    imports: tuple[str, ...]  # modules whose import in a script shows this framework
    commands: tuple[str, ...]  # words of a command that show it
    how_to_save: str  # how it is asked for a save, and what to know about that
    step_name: re.Pattern[str] | None = None  # of a checkpoint's directory; group 1 is the step; None: `is_step` tells
    folder: str = ""  # below the directory of the checkpoints, in which they are where a script says nothing
    writes: Writes = OWN_WRITES
    resume_option: str = ""  # the first of `resume`'s arguments, where a script may have another name for it
    has_resume_arguments: bool = True  # false: `resume` names none, whatever the script
    resume_keyword: str = ""  # by which a script passes it on
    target_step: int | None = None  # at which training ends
    target_options: tuple[str, ...] = ()  # that say it
    target_keywords: tuple[tuple[str, str], ...] = ()  # the same of calls: a keyword, and whose
    ends_at_target: bool = False  # exit code 0 before the target step is no end of the training
    world_change: WorldChange = WorldChange.YES  # of its usual checkpoints
    step_line: str = ""  # expression of a line that it prints of a step, which is group 1; `{total}`: the last step
    total_options: tuple[str, ...] = ()  # that say the last step, for `step_line` alone
    notice_options: tuple[str, ...] = ()  # by which it saves on a signal on its own
    answers_notice: bool = False  # it saves on SIGTERM without any option
    attach_takes: str = ""  # the call that takes the chosen checkpoint where it names none, with `--attach`
    converted_words: tuple[str, ...] = ()  # by which a script asks for converted checkpoints
    converted_option: str = ""  # the same of a command line, without a value
    finds: re.Pattern[str] | None = None  # what its own resume searches names for, where a part of a name is enough

    def list_steps(self, root: Path) -> list[Step]:
        """Return the checkpoints below a directory, in any order, none of them judged.  Raises OSError."""
        below = root / self.folder
        places = [root, below] if self.folder and below.is_dir() and not below.is_symlink() else [root]
        return [step for place in places for step in self._steps_in(place)]

    def _steps_in(self, root: Path) -> list[Step]:
        """Return those of one directory.  Links are passed over: what one leads to is listed by its own name."""
        with os.scandir(root) as entries:
            names = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
        if self.step_name is None:
            return [Step(root / name, self.number_of(name)) for name in names if self.is_step(root / name)]
        return [Step(root / name, _number(found)) for name in names if (found := self.step_name.fullmatch(name))]

    def number_of(self, name: str) -> int | None:
        """Return the step that the name of a checkpoint shows, where names are the script's own."""
        return last_number(name)

    def is_step(self, path: Path) -> bool:
        """Tell whether a path itself is one checkpoint of this framework.  Raises OSError."""
        return self.step_name is not None and self.step_name.fullmatch(path.name) is not None and path.is_dir()

    def complete(self, step: Step, *, world_size: int | None) -> Contents:
        """Read names, sizes and metadata; what is missing or torn is in `problems`.

        Args:
            step: the checkpoint.
            world_size: number of ranks, where the caller knows it and the checkpoint does not say it.

        Raises:
            OSError: it cannot be listed.
        """
        contents = Contents(Tree(step.path), step, step.number, world_size)
        self.look(contents)
        return contents

    def look(self, contents: Contents) -> None:
        """Add the parts of a checkpoint, and what is wrong with them."""
        ...

    def resume(self, contents: Contents) -> Resume:
        """Return how to resume from a checkpoint."""
        ...

    def pointers(self, step: Step) -> Mapping[Path, bytes]:  # noqa: ARG002
        """Return the files that name this checkpoint where the framework resumes from it, and what they hold then.

        By the checkpoint's name and a small file in it; whether it is whole does not matter.
        """
        return {}

    def directory(self, script: Script) -> tuple[str | None, str] | None:  # noqa: ARG002
        """Return where the checkpoints go and what shows it, where more decides that than `writes` says.

        None: `writes` says it.  A directory of None: it is not known, and why.
        """
        return None

    def own_resume(self, script: Script) -> tuple[str, str] | None:  # noqa: ARG002
        """Return the option of a program of the framework's own, and what shows it; `NAME=` takes the path behind it.

        None: the command starts no such program, or takes no argument at its end.
        """
        return None

    def takes_resume(self, script: Script) -> bool:  # noqa: ARG002
        """Tell whether the framework's own parser reads the resume arguments of a script's command line."""
        return False

    def progress(self, root: Path) -> int | None:
        """Return the highest step that the names below a directory show; None: they show none.  Raises OSError."""
        return max((step.number for step in self.list_steps(root) if step.number is not None), default=None)

    def beside(self, step: Step) -> Step | None:
        """Return the checkpoint before one in its directory, by their numbers; for the first, the one after it.

        Both are of one training, as a rule: what one has and the other lacks was lost.  Where the script has changed
        instead, only the first checkpoint behind the change is judged by the old ones.  Raises OSError.
        """
        if step.number is None:
            return None
        steps = self.list_steps(step.path.parent)
        others = [(each.number, each) for each in steps if each.number is not None and each.path != step.path]
        older = [pair for pair in others if pair[0] <= step.number]
        if older:
            return max(older, key=lambda pair: pair[0])[1]
        return min(others, key=lambda pair: pair[0])[1] if others else None


_LAST_NUMBER = re.compile(r"(\d{1,18})(?!.*\d)")


def last_number(name: str) -> int | None:
    """Return the last number in a name, which counts as the step; None: there is none.

    >>> last_number("run2-step-300")
    300
    """
    found = _LAST_NUMBER.search(name)
    return int(found[1]) if found else None


DIGITS_MAX = 18  # a step that is longer is no step


def _number(match: re.Match[str]) -> int | None:
    text = match[1] if match.re.groups else ""
    return int(text) if text and text.isascii() and text.isdigit() and len(text) <= DIGITS_MAX else None
