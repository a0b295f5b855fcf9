"""What the state was when the last step was done, for as long as nothing has changed it since.

A notice may come in an evaluation, a compilation, or while a loader waits.  Then the state of the last step is still
there: its tensors are where they were, and what is no tensor was taken down at the end of the step.  Whether a tensor
has changed, torch's version counters tell, and its address; numbers of some parameters tell of changes through `.data`,
which no counter sees (weights that an average is swapped in for, merged adapters).
"""

from __future__ import annotations

import random
import statistics
import time
from operator import attrgetter, is_
from typing import TYPE_CHECKING

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from stepkeeper_trainer.living import living
from stepkeeper_trainer.log import say
from stepkeeper_trainer.state.tree import local

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from stepkeeper_trainer.coordinate.agreement import Proposal
    from stepkeeper_trainer.state.training import Gathered, TrainingState

PROBES = 64  # parameters of which a number is compared
SHARE_MAX = 0.02  # of a step's time, that taking down may cost
SECONDS_MAX = 0.001  # that it may cost however short steps are
_version, _trained = attrgetter("_version"), attrgetter("requires_grad")
TRIES = 5  # steps over which the cost is judged: the least, as other processes are no cost of it


class LastStep:
    """Of one rank.  The main thread calls `mark` and `forget`; another thread may call the rest between them."""

    def __init__(self, state: TrainingState) -> None:
        self._state = state
        self._gathered: Gathered | None = None
        self._versions: list[int] = []
        self._addresses: list[int] = []
        self._tensors: list[torch.Tensor] = []  # of the modules
        self._flags: list[bool] = []  # whether they are trained: a module's description says so
        self._weights: list[torch.Tensor] = []  # what this rank holds of these tensors
        self._probes: list[list[torch.Tensor]] = []  # of one device and type each
        self._probed: list[torch.Tensor] = []
        self._modules: object = None  # of the last full look, by identity
        self._in_place = False  # every tensor of a module is one of its parameters or buffers
        self._costs: list[float] = []
        self._steps: list[float] = []
        self._cost = ""  # where it is too high for this rank
        self._given_up = False  # the state is not taken down any more
        self._marked_at = time.perf_counter()
        self.why_not = "no step is done yet"  # why the state of the last step is not known

    def mark(self) -> None:
        """Take the state down as it is, at the end of a step."""
        began = time.perf_counter()
        step_s, self._marked_at = began - self._marked_at, began
        self._gathered = None
        if self._given_up:
            return
        self._know_modules()
        if not self._in_place:
            self.why_not = "a module's state is made when it is asked for"
            return
        if list(map(_trained, self._tensors)) != self._flags:
            self.why_not = "other parameters are trained than at the last look at the modules"
            return
        try:
            gathered = self._state.gather_again()
            self._versions, self._addresses = self._look(gathered)
        except Exception as error:  # noqa: BLE001  # a tensor without a version counter, a part without a state just now
            self.why_not = f"{type(error).__name__}: {error}".splitlines()[0]
            return
        self._probed = [torch.cat(views) for views in self._probes]
        self._gathered, self.why_not = gathered, "another rank is elsewhere, or does not know its last step"
        self._judge(time.perf_counter() - began, step_s)

    def forget(self) -> None:
        """Take note that the state is going to change."""
        self._gathered = None
        if not self._given_up:
            self.why_not = "the next step is changing the state"

    @property
    def too_dear(self) -> bool:
        """Whether taking the state down costs this rank too much; it goes on until all ranks have heard of it."""
        return bool(self._cost)

    def note_agreed(self, agreed: Proposal) -> None:
        """Take the state down no more where that costs any rank too much.

        All ranks end it at the same step: a `state_dict()` of the script's own may wait for the other ranks.
        """
        if agreed.too_dear and not self._given_up:
            self._given_up = True
            self._gathered, self.why_not = None, self._cost or "taking the state down costs another rank too much"

    @property
    def unchanged(self) -> bool:
        """Whether the state is still as it was marked."""
        gathered = self._gathered
        if gathered is None:
            return False
        if torch.cuda.is_available():
            if living(torch.cuda.CUDAGraph):
                self.why_not = "a CUDA graph may change the state at any time"
                return False
            for device in {each.device for each in (*self._weights, *map(local, gathered.others)) if each.is_cuda}:
                torch.cuda.synchronize(device)
        same = (
            self._has_its_tensors()
            and self._look(gathered) == (self._versions, self._addresses)
            and all(torch.equal(torch.cat(views), then) for views, then in zip(self._probes, self._probed, strict=True))
        )
        if not same:
            self.why_not = "weights or buffers have changed since the last step"
        return same

    def take(self) -> Callable[[], dict[str, torch.Tensor]] | None:
        """Return what collects the tensors of the state of the last step; None where it is not known."""
        gathered = self._gathered
        return None if gathered is None else lambda: self._state.complete(gathered)

    def _look(self, gathered: Gathered) -> tuple[list[int], list[int]]:
        """Return the versions of all tensors, and the addresses of the modules'.

        Raises:
            RuntimeError: one has no version counter.
        """
        others = [*gathered.others, *self._state.scaler_tensors]
        if DTensor in set(map(type, others)):
            others = list(map(local, others))
        versions = [*map(_version, self._weights), *map(_version, others)]
        scalers = self._state.scaler_tensors
        return versions, [*map(torch.Tensor.data_ptr, self._weights), *map(torch.Tensor.data_ptr, scalers)]

    def _has_its_tensors(self) -> bool:
        """Whether the modules still have the tensors that they had; in a forward, FSDP shows others of its own."""
        looked = [tensor for found, _ in self._state.modules_then.values() for tensor in found.values()]
        if not all(map(is_, map(local, looked), self._weights)):
            return False
        modules = [each for part in self._state.modules.values() for each in part.module.modules()]
        return any(isinstance(each, FSDPModule) for each in modules) or {id(each) for each in looked} <= self._own()

    def _judge(self, cost_s: float, step_s: float) -> None:
        """Say so where it costs too much of a step: all ranks give it up then."""
        if len(self._costs) == TRIES:
            return
        self._costs.append(cost_s)
        self._steps.append(step_s)
        if len(self._costs) < TRIES:
            return
        cost, step = min(self._costs), statistics.median(self._steps[1:])
        if cost > max(SECONDS_MAX, SHARE_MAX * step):
            self._cost = f"taking the state down costs {1000 * cost:.1f} ms of a step of {1000 * step:.0f} ms"
            say("notices_wait_for_a_step", why=self._cost)

    def _know_modules(self) -> None:
        """Look at the modules' tensors, where the last full look has found others."""
        known = self._state.modules_then
        if known is self._modules:
            return
        self._modules = known
        tensors = [tensor for found, _ in known.values() for tensor in found.values()]
        extra = any(skeleton["extra"] for _, skeleton in known.values())
        self._in_place = not extra and {id(each) for each in tensors} <= self._own()
        self._tensors, self._flags = tensors, list(map(_trained, tensors))
        self._weights = list(map(local, tensors))
        self._probes = _views(self._weights)

    def _own(self) -> set[int]:
        parts = self._state.modules.values()
        return {id(each) for part in parts for each in (*part.module.parameters(), *part.module.buffers())}


def _views(tensors: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Return one number of some tensors, by device and type."""
    with torch.no_grad():
        filled = [each for each in tensors if each.numel()]
        views: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
        chosen = random.Random(len(filled))  # noqa: S311  # the same each time, and in no step with repeated layers
        for tensor in chosen.sample(filled, min(PROBES, len(filled))):
            own = tensor.detach()
            middle = sum((size // 2) * step for size, step in zip(own.shape, own.stride(), strict=True))
            view = own.as_strided((1,), (1,), own.storage_offset() + middle)
            views.setdefault((tensor.device, tensor.dtype), []).append(view)
    return list(views.values())
