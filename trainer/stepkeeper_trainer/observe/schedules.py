"""A resume gives a schedule the options that it was saved with: one that the script has made with others is told.

A longer run, or another learning rate, has no effect then.  torch's schedules go beyond their end without any error, or
raise one in the middle of training.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from torch.optim.lr_scheduler import LRScheduler

from stepkeeper_trainer.log import warn

if TYPE_CHECKING:
    from stepkeeper_trainer.state.training import TrainingState

MOVING = ("optimizer", "last_epoch")  # arguments that are no options


def options_of(state: TrainingState) -> dict[str, dict[str, Any]]:
    """Return what the schedules of the state were made with, by part."""
    return {name: dict(_options(part)) for name, part in state.others.items() if isinstance(part, LRScheduler)}


def tell_restored(made: dict[str, dict[str, Any]], state: TrainingState) -> None:
    """Compare what the script has made with what a resume has put into its place."""
    for name, restored in options_of(state).items():
        changed = [
            f"{option}={value} (the script has {made[name][option]})"
            for option, value in restored.items()
            if option in made.get(name, {}) and made[name][option] != value
        ]
        if changed:
            warn(
                "schedule_restored",
                part=name,
                options=", ".join(changed),
                why="a resume continues the schedule that was saved",
                remedy="to change it, set these attributes after resume()",
            )


def _options(schedule: LRScheduler, prefix: str = "") -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for name in [*inspect.signature(type(schedule).__init__).parameters, "base_lrs"]:
        value = getattr(schedule, name, None)
        if name not in MOVING and value is not None and _plain(value):
            found.append((prefix + name, list(value) if isinstance(value, list) else value))
    for number, each in enumerate(getattr(schedule, "_schedulers", ())):
        if isinstance(each, LRScheduler):
            found += _options(each, f"{prefix}{number}.")
    return found


def _plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_plain, value))
    return isinstance(value, bool | int | float | str) or (isinstance(value, dict) and all(map(_plain, value)))
