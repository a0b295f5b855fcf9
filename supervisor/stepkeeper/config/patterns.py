"""The table `[framework.generic]` of a configuration file: checkpoints of a layout that the user describes."""

from __future__ import annotations

from typing import Any

import msgspec

from stepkeeper.core.exits import ExitCode
from stepkeeper.errors import StepkeeperError


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


_NUMBER = "{step}"


def parse(table: Any, where: str) -> Patterns:
    """Return what the table says.

    Raises:
        StepkeeperError: a key or a value is wrong.
    """
    try:
        patterns = msgspec.convert(table, Patterns)
    except msgspec.ValidationError as error:
        raise StepkeeperError(f"{where}: [framework.generic]: {error}", ExitCode.USAGE) from error
    if patterns.steps.count(_NUMBER) != 1 or "/" in patterns.steps:
        raise StepkeeperError(
            f"{where}: [framework.generic] steps: {patterns.steps!r} is no name with {_NUMBER} once in it, such as "
            f"'ckpt-{_NUMBER}'",
            ExitCode.USAGE,
        )
    if patterns.step_line and patterns.step_line.count(_NUMBER) != 1:
        raise StepkeeperError(
            f"{where}: [framework.generic] step_line: {patterns.step_line!r} is no line with {_NUMBER} once in "
            f"it, such as 'step {_NUMBER} of'",
            ExitCode.USAGE,
        )
    if (type(patterns.target) is int and patterns.target <= 0) or patterns.target == "":
        raise StepkeeperError(
            f"{where}: [framework.generic] target: {patterns.target!r} is neither a step nor an option of the command",
            ExitCode.USAGE,
        )
    for pattern in patterns.every_rank:
        if pattern.count("{rank}") != 1:
            raise StepkeeperError(
                f"{where}: [framework.generic] every_rank: {pattern!r} is no name with {{rank}} once in it",
                ExitCode.USAGE,
            )
    return patterns
