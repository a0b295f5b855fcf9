"""A resume gives a schedule the options that it was saved with.  A warning names those that the script made otherwise.

A longer run, or another learning rate, has no effect then.  torch's schedules go beyond their end without any error, or
raise one in the middle of training.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, TypeGuard

from torch.optim.lr_scheduler import LRScheduler

from stepkeeper_trainer.formats.messages import shorten
from stepkeeper_trainer.log import warn

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from stepkeeper_trainer.state.tree import Stateful

Options = dict[str, dict[str, Any]]  # by part and name
MOVING = ("optimizer", "last_epoch")  # arguments that are no options


def options_of(parts: Mapping[str, Stateful]) -> Options:
    """Return what torch's own schedules among the parts were made with; of other types attributes may move."""
    return {name: dict(_options(part)) for name, part in parts.items() if _is_torchs(part)}


def tell_restored(made: Options, restored: Options) -> None:
    """Compare what the script has made with what a resume has put into its place."""
    for name, options in restored.items():
        own = made.get(name, {})
        changed = [
            f"{option}={value} (the script has {own[option]})"
            for option, value in options.items()
            if option in own and _differs(own[option], value)
        ]
        if changed:
            warn(
                "schedule_restored",
                part=name,
                options=shorten(", ".join(changed)),
                why="a resume continues the schedule that was saved",
                remedy="to change it, set these attributes after resume()",
            )


def _options(schedule: LRScheduler, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name in [*inspect.signature(type(schedule).__init__).parameters, "base_lrs"]:
        value = getattr(schedule, name, None)
        if name not in MOVING and value is not None and _is_plain(value):
            yield prefix + name, list(value) if isinstance(value, list) else value
    for number, each in enumerate(getattr(schedule, "_schedulers", ())):
        if _is_torchs(each):
            yield from _options(each, f"{prefix}{number}.")


def _differs(own: Any, restored: Any) -> bool:
    """Compare what both have: training may have added parameter groups."""
    if isinstance(own, list) and isinstance(restored, list):
        return any(one != other for one, other in zip(own, restored, strict=False))
    return bool(own != restored)


def _is_torchs(part: object) -> TypeGuard[LRScheduler]:
    return isinstance(part, LRScheduler) and type(part).__module__.startswith("torch.")


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return isinstance(value, bool | int | float | str)
