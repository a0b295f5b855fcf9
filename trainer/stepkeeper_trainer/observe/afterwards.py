"""What changes between `step_done` and the next turn of the loop.  A resume begins with the turn, and lacks the change.

A schedule that moves after `step_done` is one step behind from the first resume on, without any error.  Weights that
change between `resume` and the first turn are no longer those of the checkpoint, as where initial ones are loaded late.

Only `CheckpointManager.steps` makes turns that the library sees.  No method of a part is called: rank 0 looks alone,
and a `state_dict()` may wait for the other ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.optim.lr_scheduler import LRScheduler

from stepkeeper_trainer.buffers import view_bytes
from stepkeeper_trainer.log import warn
from stepkeeper_trainer.sampler import GlobalSampler
from stepkeeper_trainer.state.tree import local

if TYPE_CHECKING:
    from stepkeeper_trainer.state.training import TrainingState

LOOKS = 2  # turns over which weights are compared: that asks the device
WEIGHTS_MAX = 8  # of each module, evenly chosen
NUMBERS_MAX = 1024  # of each, the first ones

Numbers = tuple[torch.dtype, bytes]
Weights = dict[str, list[tuple[torch.Tensor, Numbers | None]]]  # by part
Counters = dict[str, object]  # by part


class _Left(NamedTuple):
    """How things were as `step_done` ended."""

    step: int
    counters: Counters
    weights: Weights


class Afterwards:
    """Of rank 0; used by its main thread alone."""

    def __init__(self, state: TrainingState, resumed_step: int | None) -> None:
        """Begin right after a resume."""
        self._state = state
        self._resumed = None if resumed_step is None or self._switches() else (resumed_step, self._weights())
        self._turning = False  # `steps` makes the turns
        self._left: _Left | None = None
        self._looks = 0
        self._moved: set[str] = set()  # modules, in each turn so far
        self._told: set[str] = set()

    def begin(self) -> None:
        """Compare the weights as the loop begins."""
        self._turning, self._left = True, None
        resumed, self._resumed = self._resumed, None
        changed = _replaced(resumed[1], self._weights()) if resumed is not None else []
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
        self._resumed = None  # a step changes weights
        if self._left is not None:  # the loop is another's
            self._turning, self._left = False, None
        if self._turning:
            self._left = _Left(step, self._counters(), self._weights() if self._looks < LOOKS else {})
            self._looks += 1

    def turn(self) -> None:
        """Compare as the loop comes round."""
        left, self._left = self._left, None
        if left is None:
            return
        now = self._counters()
        moved = [name for name, was in left.counters.items() if None not in (was, now.get(name)) and was != now[name]]
        if left.weights:
            changed = set(_replaced(left.weights, self._weights()))
            self._moved = changed if self._looks == 1 else self._moved & changed
            if self._looks == LOOKS:  # weights that an evaluation swaps come back, and it is rarely in each turn
                moved += sorted(self._moved)
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

    def _counters(self) -> Counters:
        """Return where optimizers, schedules and the sampler are: a schedule may move once in an epoch."""
        found: Counters = {}
        for name, part in self._state.optimizers.items():
            rate = part.optimizer.param_groups[0].get("lr") if part.optimizer.param_groups else None
            found[name] = rate if type(rate) is float else None
        for name, other in self._state.others.items():
            if isinstance(other, LRScheduler):
                found[name] = getattr(other, "last_epoch", None)  # a chained one has none
            elif isinstance(other, GlobalSampler):
                found[name] = other.steps_done
        return found

    def _switches(self) -> bool:
        """Whether an optimizer has other weights for an evaluation (`optimizer.train()`, as schedule-free ones)."""
        groups = [group for part in self._state.optimizers.values() for group in part.optimizer.param_groups]
        return any("train_mode" in group for group in groups)

    def _weights(self) -> Weights:
        found: Weights = {}
        for name, part in self._state.modules.items():
            own = list(part.parameters().values())
            chosen = own[:: max(1, len(own) // WEIGHTS_MAX)]
            found[name] = [(each, _numbers(each)) for each in chosen]
        return found


def _replaced(then: Weights, now: Weights) -> list[str]:
    """Return the modules of which a weight is the same object, and holds something else of the same type."""
    return [
        name
        for name, weights in then.items()
        if any(
            one is other and was is not None and holds is not None and was[0] == holds[0] and was != holds
            for (one, was), (other, holds) in zip(weights, now.get(name, ()), strict=False)
        )
    ]


def _numbers(weight: torch.Tensor) -> Numbers | None:
    """Return some of what a rank holds of a weight; None where it holds nothing that can be compared."""
    own: Any = local(weight)
    if type(own) not in (torch.Tensor, torch.nn.Parameter) or own.layout is not torch.strided or not own.numel():
        return None
    if own.is_meta or own.is_quantized:
        return None
    some = own.detach().view(-1)[:NUMBERS_MAX] if own.is_contiguous() else own.detach()[(0,) * own.dim()]
    return own.dtype, bytes(view_bytes(some.cpu()))
