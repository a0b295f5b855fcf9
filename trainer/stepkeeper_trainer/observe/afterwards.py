"""What changes between the end of a step and the next turn of the loop: a resume begins with the turn, and lacks it.

A schedule that moves after `step_done` is one step behind from the first resume on, without any error.  Where `steps()`
makes the turns, the state is compared over two of them; learning rates are compared over all, as a schedule may move
once in an epoch.  Weights that change between `resume()` and the first turn are no longer those of the checkpoint, as
where a script loads its initial weights too late.  A save that the script begins itself, before its step is done, holds
half a step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.optim.lr_scheduler import LRScheduler

from stepkeeper_trainer.log import warn
from stepkeeper_trainer.observe.position import moves_by_itself, state_of
from stepkeeper_trainer.state.tree import is_plain, local

if TYPE_CHECKING:
    from stepkeeper_trainer.state.training import TrainingState

LOOKS = 2  # turns over which all of the state is compared
TENSORS_MAX = 64  # of each module, of which numbers are compared
NUMBERS_MAX = 4096  # of each of these
WEIGHTS_MAX = 4  # of each optimizer, whose version counters are compared in every step


class _Left(NamedTuple):
    """How things were as `step_done` ended."""

    step: int
    rates: dict[str, Any]
    parts: dict[str, Any] | None


class Afterwards:
    """Of rank 0; used by its main thread alone."""

    def __init__(self, state: TrainingState, resumed_step: int | None) -> None:
        """Begin right after a resume."""
        self._state = state
        self._resumed = None if resumed_step is None else (resumed_step, self._modules())
        self._left: _Left | None = None
        self._done: tuple[int, list[int]] | None = None  # the newest step, and version counters at its end
        self._looks = 0
        self._told: set[str] = set()

    def begin(self) -> None:
        """Compare the weights as the loop begins."""
        resumed, self._resumed = self._resumed, None
        changed = _others(resumed[1], self._modules()) if resumed is not None else []
        if resumed is not None and changed:
            warn(
                "weights_replaced_after_resume",
                step=resumed[0],
                parts=",".join(changed),
                why="they have changed between resume() and the first step: "
                "training does not continue from the checkpoint",
                remedy="load or initialise weights before resume()",
            )

    def leave(self, step: int) -> None:
        """Note how things are as `step_done` ends."""
        self._left = _Left(step, self._rates(), self._parts() if self._looks < LOOKS else None)
        self._done = step, self._weights()

    def turn(self) -> None:
        """Compare as the loop comes round."""
        left, self._left = self._left, None
        if left is None:
            return
        self._looks += 1
        moved = _others(left.rates, self._rates())
        if left.parts is not None:
            moved += [name for name in _others(left.parts, self._parts()) if name not in moved]
        names = [name for name in moved if name not in self._told]
        self._told.update(names)
        if names:
            warn(
                "state_moves_after_step",
                step=left.step,
                parts=",".join(names),
                why="it has changed between step_done() and the next turn of the loop: a checkpoint of this step has "
                "it as it was before, and a resume does not make that change",
                remedy="change it before step_done()",
            )

    def save(self) -> None:
        """Look whether the script begins a save within a step."""
        if self._done is None or "" in self._told or self._weights() == self._done[1]:
            return
        self._told.add("")
        warn(
            "saved_within_step",
            step=self._done[0],
            why="weights have changed since step_done(): the save has them under the number of the step before, "
            "and a resume from it does that step once more",
            remedy="call save() right after step_done()",
        )

    def _weights(self) -> list[int]:
        groups = [part.optimizer.param_groups[:1] for part in self._state.optimizers.values()]
        return [local(each)._version for first in groups for one in first for each in one["params"][:WEIGHTS_MAX]]  # noqa: SLF001

    def _rates(self) -> dict[str, Any]:
        rates: dict[str, Any] = {
            name: [group.get("lr") for group in part.optimizer.param_groups if type(group.get("lr")) is float]
            for name, part in self._state.optimizers.items()
        }
        schedules = {name: part for name, part in self._state.others.items() if isinstance(part, LRScheduler)}
        return rates | {
            name: getattr(part, "last_epoch", None) for name, part in schedules.items()
        }  # a chained one has none

    @torch.no_grad()
    def _modules(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, (tensors, _) in self._state.modules_then.items():
            chosen = list(tensors.values())
            found[name] = [_number(each) for each in chosen[:: max(1, len(chosen) // TENSORS_MAX)]]
        return found

    def _parts(self) -> dict[str, Any]:
        found = self._modules()
        for name, part in self._state.others.items():
            if not moves_by_itself(part):
                state = state_of(part)
                found[name] = state if repr(state) == repr(state_of(part)) else None  # a thread may move it at any time
        return found


def _others(then: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Return which are others; None is not known, and NaN is equal to itself."""
    known = [name for name, value in then.items() if value is not None and now.get(name) is not None]
    return [name for name in known if repr(then[name]) != repr(now[name])]


def _number(tensor: torch.Tensor) -> float | None:
    own = local(tensor.detach())
    if not is_plain(type(own)) or own.layout is not torch.strided or own.is_meta or own.is_quantized:
        return None
    some = own.reshape(-1)[:NUMBERS_MAX]
    try:
        return float((torch.view_as_real(some.resolve_conj()) if some.is_complex() else some).double().sum())
    except RuntimeError:  # of a type that torch does not convert
        return None
