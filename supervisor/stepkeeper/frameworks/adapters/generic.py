"""Checkpoints of one's own, by the patterns of `[framework.generic]` in the configuration."""

from __future__ import annotations

import fnmatch
import os
import re
from pathlib import Path
from typing import Any

import msgspec

from stepkeeper.errors import UsageError
from stepkeeper.frameworks import parts
from stepkeeper.frameworks.framework import Contents, Framework, Resume, Step, WorldChange
from stepkeeper.frameworks.script import Script

NUMBER = "{step}"


class Patterns(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What `[framework.generic]` says."""

    steps: str
    """Name of a checkpoint directory or file, with `{step}` where its number stands and `*` for anything else."""

    complete: tuple[str, ...] = ()
    """Files that must be there, such as `DONE`; `*` and `?` as in a shell; one match is enough."""

    incomplete: tuple[str, ...] = ()
    """Files that must not be there."""

    every_rank: tuple[str, ...] = ()
    """Files of each rank, with `{rank}` where its number stands: there is no gap."""

    resume: tuple[str, ...] = ()
    """Arguments that resume: `{path}` and `{step}` are filled in."""

    step_line: str = ""
    """A line that the script prints of a step, or a part of it, with `{step}` where its number stands and `*` for
    anything else."""

    target: int | str | None = None
    """The step at which training ends: a number, or the option of the command that says it, such as `--steps`."""


def parse_patterns(table: Any, where: str) -> Patterns:
    """Return what the table says.

    Raises:
        StepkeeperError: a key or a value is wrong.
    """
    try:
        patterns = msgspec.convert(table, Patterns)
    except msgspec.ValidationError as error:
        raise UsageError(f"{where}: [framework.generic]: {error}") from error
    if patterns.steps.count(NUMBER) != 1 or "/" in patterns.steps:
        raise UsageError(
            f"{where}: [framework.generic] steps: {patterns.steps!r} is no name with {NUMBER} once in it, such as "
            f"'ckpt-{NUMBER}'"
        )
    if patterns.step_line and patterns.step_line.count(NUMBER) != 1:
        raise UsageError(
            f"{where}: [framework.generic] step_line: {patterns.step_line!r} is no line with {NUMBER} once in "
            f"it, such as 'step {NUMBER} of'"
        )
    if (type(patterns.target) is int and patterns.target <= 0) or patterns.target == "":
        raise UsageError(
            f"{where}: [framework.generic] target: {patterns.target!r} is neither a step nor an option of the command"
        )
    for pattern in patterns.every_rank:
        if pattern.count("{rank}") != 1:
            raise UsageError(
                f"{where}: [framework.generic] every_rank: {pattern!r} is no name with {{rank}} once in it"
            )
    return patterns


class Generic(Framework):
    """A layout that the user describes."""

    name = "generic"
    title = "your own, by `[framework.generic]`"
    imports = ()
    commands = ()
    how_to_save = "`--stop-signal`, if the script handles it"
    world_change = WorldChange.SCRIPT

    def takes_resume(self, script: Script) -> bool:  # noqa: ARG002
        """Trust the configuration, which names the arguments."""
        return bool(self.patterns.resume)

    def __init__(self, patterns: Patterns | None = None) -> None:
        """Describe nothing without patterns."""
        self.patterns = patterns or Patterns(steps="")
        line, target = self.patterns.step_line, self.patterns.target
        self.step_line = _line(line) if line else ""
        self.target_step = target if isinstance(target, int) else None
        self.target_options = (target,) if isinstance(target, str) else ()

    def _name(self) -> re.Pattern[str]:
        return _pattern(self.patterns.steps, "{step}")

    def list_steps(self, root: Path) -> list[Step]:
        """Return what `steps` matches."""
        if not self.patterns.steps:
            return []
        with os.scandir(root) as entries:
            found = [(entry.name, self._name().fullmatch(entry.name)) for entry in entries if not entry.is_symlink()]
        return [Step(root / name, int(match[1]) if match.groups() else None) for name, match in found if match]

    def is_step(self, path: Path) -> bool:
        """Go by the name."""
        return bool(self.patterns.steps) and self._name().fullmatch(path.name) is not None and path.exists()

    def look(self, contents: Contents) -> None:
        """Require what the patterns say, and look into whatever is known by its suffix."""
        world_size = contents.world_size
        names = sorted(contents.tree.files)
        for pattern in self.patterns.complete:
            if not fnmatch.filter(names, pattern):
                contents.problem(f"{pattern}: missing")
        for pattern in self.patterns.incomplete:
            for name in fnmatch.filter([*names, *contents.tree.directories], pattern):
                contents.problem(f"{name} is there: `incomplete` says that it must not be")
        if self.patterns.every_rank:
            contents.world_change = WorldChange.NO
        for pattern in self.patterns.every_rank:
            ranks = {int(found[1]) for name in names if (found := _pattern(pattern, "{rank}").fullmatch(name))}
            parts.require_ranks(contents, pattern, ranks, world_size or max(1, max(ranks, default=0) + 1))
        for name in names:
            self._look(contents, name)
        if not names:
            contents.problem("is empty")

    @staticmethod
    def _look(contents: Contents, name: str) -> None:
        directory, _, file = name.rpartition("/")
        if file == ".metadata":
            parts.add_dcp(contents, directory)
        elif file.endswith(".safetensors"):
            parts.add_safetensors(contents, name)
        elif file.endswith((".pt", ".pth", ".bin", ".ckpt")):
            if parts.add_archive(contents, name):
                parts.read_pickle(contents, name)
        elif not file.endswith(".distcp"):
            parts.add_plain(contents, name)

    def resume(self, contents: Contents) -> Resume:
        """Fill in the arguments of the configuration."""
        filled = {"{path}": os.path.abspath(contents.step.path), "{step}": str(contents.step.number)}
        return Resume(tuple(_fill(word, filled) for word in self.patterns.resume), "`resume` of [framework.generic]")


def _fill(word: str, filled: dict[str, str]) -> str:
    for name, value in filled.items():
        word = word.replace(name, value)
    return word


def _pattern(text: str, number: str) -> re.Pattern[str]:
    """Return the expression of a name with a number in it and stars."""
    pieces = [re.escape(piece).replace(r"\*", "[^/]*") for piece in text.split(number)]
    return re.compile(r"(\d{1,18})".join(pieces[:2]) + "".join(pieces[2:]))


def _line(text: str) -> str:
    """Return the expression of a part of a line."""
    before, after = (re.escape(piece).replace(r"\*", ".*?") for piece in text.split("{step}"))
    return rf"{before}(\d{{1,18}}){after}"


FRAMEWORK = Generic()
