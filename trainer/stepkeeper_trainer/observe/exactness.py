"""What would make a resumed run another one, looked for on rank 0 while it trains: each is said once, with the remedy.

A resume goes on right after `step_done`, with the generators and the data position that were saved there.  So it is
another run where

* an evaluation after `step_done` draws random numbers: `Evaluations` sees it while it happens;
* anything else draws where a resume does not, or does not where a resume draws: `Redrawn` compares the generators at
  the next `step_done` after a save with those at the same `step_done` after a resume;
* the data position is not in the state, or does not move: `Position` looks at the first two `step_done`.

A step that draws random numbers itself, draws the same ones in both, and none of these says anything of it.
"""

from __future__ import annotations

import gc
import inspect
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils.data.dataloader import _BaseDataLoaderIter

from stepkeeper_trainer.buffers import view_bytes
from stepkeeper_trainer.log import warn
from stepkeeper_trainer.observe.replay import Redrawn
from stepkeeper_trainer.sampler import GlobalSampler
from stepkeeper_trainer.state import random_state

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from types import CodeType, FrameType

    from stepkeeper_trainer.environment import Environment
    from stepkeeper_trainer.load.resume import Resumed


EVALUATIONS = 3  # that are looked at: if they draw nothing, later ones will not either


class Exactness:
    """Of rank 0; used by its main thread alone."""

    def __init__(
        self,
        model: torch.nn.Module | None,
        parts: Mapping[str, object],
        *,
        resumed: Resumed,
        run_directory: Path,
        environment: Environment,
    ) -> None:
        """Begin right after a resume; `parts` are what the state holds beside model and optimizer."""
        self._position = Position(parts)
        self._sequence = 0  # of the newest save that was seen
        self._evaluations = Evaluations(model)
        self._redrawn = Redrawn(run_directory, resumed, comparable=not (resumed.changes or environment.skip_data))

    def arrive(self, step: int) -> None:
        """Look around as `step_done` begins."""
        self._evaluations.forget()
        self._redrawn.arrive(step)
        self._position.arrive(step)

    def leave(self, step: int, sequence: int, *, of_now: bool) -> None:
        """Note how things are as `step_done` ends; `sequence` is that of the newest save, `of_now` if of this step."""
        if sequence != self._sequence:
            self._sequence = sequence
            if of_now:
                self._redrawn.saved(step)
        self._evaluations.leave(step)


class _Left(NamedTuple):
    """How things were as `step_done` ended."""

    step: int
    generators: dict[str, bytes]
    lines: dict[tuple[int, CodeType], int]  # of each caller, the line that it was at


class Evaluations:
    """Forwards without gradients between a `step_done` and the first forward with gradients of the next step.

    One before the loop comes round to its next turn is not done again by a resume.  Whether it has come round, the
    lines tell: of the innermost function that is on the stack both times, a line further down than that of
    `step_done` belongs to the same turn.  Where somebody keeps the state that the generators had at `step_done` (as
    `torch.random.fork_rng` does), it is going to be put back.
    """

    def __init__(self, model: torch.nn.Module | None) -> None:
        self._left: _Left | None = None
        self._forwards = 0  # of the evaluation at hand
        self._clean = 0  # evaluations that drew nothing

        def look(*_: object) -> None:  # no method: a copy of the model (an average of weights) has the same observer
            if not torch.compiler.is_compiling() and self._left is not None:
                self._on_forward(self._left)

        wrapped = getattr(model, "module", None)  # evaluated without its DistributedDataParallel
        modules = [each for each in (model, wrapped) if isinstance(each, torch.nn.Module)]
        self._hooks = [module.register_forward_pre_hook(look) for module in modules]

    def leave(self, step: int) -> None:
        """Note how things are as `step_done` ends."""
        if self._hooks:
            self._left, self._forwards = _Left(step, random_state.peek(), _lines()), 0

    def forget(self) -> None:
        """Look no more until the next `leave`."""
        self._left = None

    def _on_forward(self, left: _Left) -> None:
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return  # generators do not tell their state then
        if torch.is_grad_enabled() and self._forwards:
            self._passed()
        place = None if torch.is_grad_enabled() else _further_down(left.lines)
        if place is None:  # the next turn has begun
            self.forget()
            return
        self._forwards += 1
        if self._forwards & (self._forwards - 1):  # the first, second, fourth, eighth: an evaluation may be long
            return
        if random_state.peek() == left.generators:
            return
        if _kept(left.generators):
            self._passed()
            return
        warn(
            "evaluation_draws",
            step=left.step,
            place=place,
            why="random numbers are drawn after step_done, and a resume from this step does not draw them: "
            "its losses will differ",
            remedy="evaluate before step_done(), or inside torch.random.fork_rng()",
        )
        self._stop()

    def _passed(self) -> None:
        """Take in an evaluation that changes nothing for the next step."""
        self.forget()
        self._clean += 1
        if self._clean == EVALUATIONS:
            self._stop()

    def _stop(self) -> None:
        self.forget()
        for hook in self._hooks:
            hook.remove()
        self._hooks = []


class Position:
    """Whether the first two steps move through data whose position is not in the state, or does not move."""

    def __init__(self, parts: Mapping[str, object]) -> None:
        """Take what the state holds beside model and optimizer."""
        self._parts = parts
        self._steps = 0
        self._read: list[tuple[weakref.ref[Any], int]] = []  # iterators that lived, and what they had given by then

    def arrive(self, step: int) -> None:
        """Look around as `step_done` begins: after the first step for iterators, after the second for those read."""
        self._steps += 1
        if self._steps == 1:
            self._check_sampler(step)
            if all(_knows_no_data(part) for name, part in self._parts.items() if name != "scheduler"):
                self._read = [(weakref.ref(each), _given(each)) for each in _iterators()]
        elif self._steps == 2:  # noqa: PLR2004
            self._check_loaders(step)
            self._read = []

    def _check_sampler(self, step: int) -> None:
        samplers = [part for part in self._parts.values() if isinstance(part, GlobalSampler)]
        if samplers and samplers[0].steps_done < step:
            warn(
                "data_position_stands",
                step=step,
                why="the sampler has not moved in this step: a resume starts its data again",
                remedy="call sampler.advance(samples of all ranks) in each step, before step_done()",
            )

    def _check_loaders(self, step: int) -> None:
        live = ((reference(), given) for reference, given in self._read)
        read = next((each for each, given in live if each is not None and _given(each) > given), None)
        if read is None:
            return
        warn(
            "data_position_not_saved",
            step=step,
            loader=f"{type(read).__module__.split('.')[0]}'s DataLoader",
            why="it is read in each step, and the state has neither a sampler nor a loader: "
            "unless the script finds its place in the data by itself, a resume starts its data again",
            remedy="give state={..., 'sampler': GlobalSampler(...)}, or a StatefulDataLoader as 'loader'",
        )


def _knows_no_data(part: object) -> bool:
    """Whether a part of the state can hold no position in the data: schedules, scalers, averages of weights."""
    module = type(part).__module__
    return isinstance(part, torch.nn.Module) or (
        module.split(".")[0] == "torch" and not module.startswith("torch.utils.data")
    )


def _iterators() -> list[Any]:
    """Return the iterators over DataLoaders that there are: the collector knows who lives."""
    return [each for each in gc.get_referrers(*_kinds(_BaseDataLoaderIter)) if isinstance(each, _BaseDataLoaderIter)]


def _given(iterator: Any) -> int:
    """Return how many batches an iterator has given."""
    return int(getattr(iterator, "_num_yielded", 0))


def _kinds(base: type[Any]) -> Iterator[type[Any]]:
    yield base
    for kind in base.__subclasses__():
        yield from _kinds(kind)


def _kept(generators: Mapping[str, bytes]) -> bool:
    """Whether a tensor other than the library's own holds such a state of torch's generators."""
    sizes = {len(state) for state in generators.values()}
    for each in gc.get_objects():
        if type(each) is torch.Tensor and each.dtype is torch.uint8 and each.device.type == "cpu":
            whole = each.numel() in sizes and each.numel() == each.untyped_storage().nbytes()  # no part of another
            if whole and not random_state.is_ours(each) and bytes(view_bytes(each)) in generators.values():
                return True
    return False


def _lines() -> dict[tuple[int, CodeType], int]:
    return {(id(frame), frame.f_code): frame.f_lineno for frame in _frames(inspect.currentframe())}


def _further_down(lines: Mapping[tuple[int, CodeType], int]) -> str | None:
    """Return where the innermost common function is now, if that is further down than it was."""
    for frame in _frames(inspect.currentframe()):
        then = lines.get((id(frame), frame.f_code))
        if then is not None:
            name = Path(frame.f_code.co_filename).name
            return f"{name}:{frame.f_lineno}" if frame.f_lineno > then else None
    return None


def _frames(frame: FrameType | None) -> Iterator[Any]:
    while frame is not None:
        yield frame
        frame = frame.f_back
