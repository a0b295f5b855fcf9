"""What training uses and the state does not have, looked for on rank 0 in the first two steps: each is said once.

A resume begins such a part again, without any error: a schedule, a gradient scaler, an optimizer with its moments, an
average of weights, and gradients that one `step_done` leaves for the next one.  A part of the script's own may hold
what is missing elsewhere: where the state has one, only gradients are looked at.

An optimizer that a script makes anew in the middle of training leaves the old one in the state.  `Replaced` looks at
each save whether an optimizer of the state still trains.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel

from stepkeeper_trainer.living import living
from stepkeeper_trainer.log import warn
from stepkeeper_trainer.sampler import GlobalSampler
from stepkeeper_trainer.state.tree import local

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from stepkeeper_trainer.state.training import TrainingState

KINDS = (LRScheduler, Optimizer, GradScaler, AveragedModel)
KNOWN = ("torch", "torchdata", "datasets", "stepkeeper_trainer")  # packages whose parts hold nothing of these kinds
PROBES = 4  # weights of which a number is compared
LOOKS = 2  # steps that are looked at
TRAINED_MAX = 64  # weights of an optimizer that are looked at in a save, evenly chosen


class _Seen(NamedTuple):
    """What lived as the first step ended, and how it was."""

    reference: weakref.ref[Any]
    was: list[int]


class Omissions:
    """Of rank 0; used by its main thread alone."""

    def __init__(self, state: TrainingState) -> None:
        """Begin right after a resume."""
        self._state = state
        self._steps = 0
        self._seen: list[_Seen] = []
        self._weights = self._versions()
        self._numbers = self._probe()
        self._scalings = _scalings()

    def arrive(self, step: int) -> None:
        """Look around as `step_done` begins."""
        self._steps += 1
        if self._steps > LOOKS:
            return
        if self._steps == 1 and not any(map(_may_hold_more, self._state.others.values())):
            self._seen = [_Seen(weakref.ref(each), _counts(each)) for each in _living()]
        elif self._steps == LOOKS:
            self._check_parts(step)
        if self._check_gradients(step) or self._steps == LOOKS:
            self._weights, self._numbers = [], []
            return
        self._weights, self._numbers, self._scalings = self._versions(), self._probe(), _scalings()

    def _check_parts(self, step: int) -> None:
        seen, self._seen = self._seen, []
        living = [(each, was) for each, was in ((one.reference(), one.was) for one in seen) if each is not None]
        saved = [part.optimizer for part in self._state.optimizers.values()]
        given = set(map(id, _with_members(self._state.others.values())))
        given |= {id(each) for part in self._state.modules.values() for each in part.module.modules()}
        known = {id(weight) for part in self._state.modules.values() for weight in part.parameters().values()}
        trained = {id(weight) for one in saved for weight in _weights_of(one)}
        for each, was in living:
            if id(each) in given or (isinstance(each, LRScheduler) and _contained(each, living)):
                continue
            if isinstance(each, LRScheduler):
                missing = any(each.optimizer is one for one in saved)
            elif isinstance(each, Optimizer):
                own = set(map(id, _weights_of(each)))
                missing = _counts(each) != was and not own & trained and bool(each.state or own - known)
            else:
                missing = _counts(each) != was
            if missing:
                warn(
                    "part_not_saved",
                    step=step,
                    part=type(each).__name__,
                    why="training uses it, and the state does not have it: "
                    "unless the script restores it, a resume begins it again",
                    remedy=f"give it a name of its own in CheckpointManager(state={{...}}): {_advice(each)}",
                )

    def _check_gradients(self, step: int) -> bool:
        """Say whether gradients wait for a later step, as when `step_done` comes after each micro-batch."""
        weights = self._weights_of_all()
        if not weights or self._versions() != self._weights or self._probe() != self._numbers:
            return False  # an optimizer has stepped, perhaps at a learning rate of 0, perhaps through `.data`
        gradients = [local(each.grad) for each in weights if each.grad is not None and not each.grad.is_sparse]
        if not gradients or _scalings() != self._scalings or _living((torch.cuda.CUDAGraph,)):
            return False  # a scaler has left out the step, perhaps for another rank; a replayed graph moves no counter
        finite = all(bool(each.isfinite().all()) for each in gradients)
        if not finite or not any(bool(each.any()) for each in gradients):
            return False  # the script may leave out a step whose gradients are not finite
        warn(
            "gradients_not_saved",
            step=step,
            why="no optimizer has stepped before step_done(), and gradients wait for a later step: "
            "a checkpoint does not have them, so a resume from such a step loses them",
            remedy="call step_done() once for each optimizer step, after all its micro-batches",
        )
        return True

    def _weights_of_all(self) -> list[torch.Tensor]:
        parts = self._state.optimizers.values()
        return [weight for part in parts for weight in _weights_of(part.optimizer)]

    def _versions(self) -> list[int]:
        return _versions(self._weights_of_all())

    def _probe(self) -> list[float]:
        """Return a number of some weights."""
        weights = [local(each.detach()) for each in self._weights_of_all()[:PROBES]]
        plain = [each for each in weights if type(each) is torch.Tensor and each.is_floating_point() and each.numel()]
        return [float(each[(0,) * each.dim()]) for each in plain]


class _Trained:
    """How some weights of an optimizer were at a save, and what the optimizer has learned of them."""

    def __init__(self, optimizer: Any, step: int) -> None:
        weights = _weights_of(optimizer)
        some = weights[:: max(1, len(weights) // TRAINED_MAX)]
        held = optimizer.state if isinstance(optimizer.state, Mapping) else {}
        kept = [held.get(weight) for weight in some]
        values = [each for one in kept if isinstance(one, Mapping) for each in one.values()]
        tensors = [each for each in values if isinstance(each, torch.Tensor)]
        self.step = step
        self.weights = _versions(some)
        self.numbers = [each for each in values if isinstance(each, (int, float))]
        self._moments = [(weakref.ref(each), _versions([each])) for each in tensors]

    def moved(self, last: _Trained) -> bool:
        """Tell whether moments that were there have changed in place, or the number of a step."""
        pairs = zip(self._moments, last._moments, strict=False)
        return self.numbers != last.numbers or any(
            now() is was() and counts != before for (now, counts), (was, before) in pairs
        )

    def has_those_of(self, last: _Trained) -> bool:
        """Tell whether it has moments, and they are the same tensors."""
        pairs = zip(self._moments, last._moments, strict=False)
        return 0 < len(self._moments) == len(last._moments) and all(now() is was() for (now, _), (was, _) in pairs)


class Replaced:
    """Of rank 0; used by its main thread alone.

    The moments of an optimizer of the state moved before, and stand still in two saves in a row while its weights move.
    One without moments (SGD without momentum) has nothing to lose.  One whose moments no counter shows is never named.
    """

    def __init__(self, state: TrainingState) -> None:
        """Begin right after a resume."""
        self._state = state
        self._last: dict[str, _Trained] = {}
        self._worked: set[str] = set()  # optimizers, since the last warning
        self._stood: dict[str, int] = {}  # optimizer -> the step since which it stands still

    def saved(self, step: int) -> None:
        """Look around as a save has begun."""
        for name, part in self._state.optimizers.items():
            last = self._last.get(name)
            if last is not None and step <= last.step:
                continue
            now = self._last[name] = _Trained(part.optimizer, step)
            if last is None:
                continue
            moved = now.moved(last)
            if moved:
                self._worked.add(name)
            idle = name in self._worked and not moved and now.has_those_of(last)
            if not idle or now.weights == last.weights:
                self._stood.pop(name, None)
            elif name not in self._stood:
                self._stood[name] = last.step
            elif not self._has_successor(name) and not _living((torch.cuda.CUDAGraph,)):  # a replay moves no counter
                self._worked.remove(name)
                warn(
                    "optimizer_replaced",
                    step=step,
                    part=name,
                    why=f"its weights have changed since step {self._stood.pop(name)}, and its own state has not: "
                    "another optimizer trains them, and a resume begins that one again",
                    remedy="change the optimizer of the state in place (param_groups, add_param_group), or give both "
                    "optimizers to CheckpointManager(state={...})",
                )

    def _has_successor(self, name: str) -> bool:
        """Whether another optimizer of the state has some of the same weights: two may take turns."""
        own = set(map(id, _weights_of(self._state.optimizers[name].optimizer)))
        others = (part.optimizer for other, part in self._state.optimizers.items() if other != name)
        return any(id(weight) in own for other in others for weight in _weights_of(other))


def _weights_of(optimizer: Any) -> list[torch.Tensor]:
    """Return what an optimizer trains; one whose constructor has failed has no groups."""
    return [weight for group in getattr(optimizer, "param_groups", ()) for weight in group["params"]]


def _versions(tensors: Iterable[torch.Tensor]) -> list[int]:
    counted = [each for each in tensors if not each.is_inference()]  # these have no counter
    return [count for each in counted for count in (each._version, local(each)._version)]  # noqa: SLF001


def _living(kinds: tuple[type, ...] = KINDS) -> list[Any]:
    return living(*kinds)


def _scalings() -> int:
    """Return a number that an update of a scaler moves, and its first use does not."""
    return sum(sum(_counts(each)) for each in _living((GradScaler,)))


def _counts(each: Any) -> list[int]:
    """Return what moves when it is used; asks no device."""
    if isinstance(each, Optimizer):
        return _versions(_weights_of(each))
    kept = [getattr(each, name, None) for name in ("_scale", "_growth_tracker", "n_averaged")]
    return _versions(tensor for tensor in kept if isinstance(tensor, torch.Tensor))


def _with_members(parts: Iterable[Any]) -> Iterator[Any]:
    """Yield parts, and the schedules that a schedule of several has."""
    for each in parts:
        yield each
        yield from _with_members(getattr(each, "_schedulers", ()) if isinstance(each, LRScheduler) else ())


def _contained(schedule: LRScheduler, living: Iterable[tuple[Any, object]]) -> bool:
    """Whether another schedule has it: that one is named."""
    wholes = [each for each, _ in living if isinstance(each, LRScheduler) and each is not schedule]
    return any(each is schedule for whole in wholes for each in _with_members(getattr(whole, "_schedulers", ())))


def _may_hold_more(part: object) -> bool:
    """Whether a part may hold schedules, scalers or optimizers: the script's own, and those of other packages."""
    return not isinstance(part, (*KINDS, torch.nn.Module, GlobalSampler)) and (
        type(part).__module__.split(".")[0] not in KNOWN
    )


def _advice(each: object) -> str:
    if isinstance(each, Optimizer):
        return "the optimizer, and the module that it trains"
    if isinstance(each, AveragedModel):
        return "'ema': averaged_model"
    return "'scheduler': scheduler" if isinstance(each, LRScheduler) else "'scaler': scaler"
