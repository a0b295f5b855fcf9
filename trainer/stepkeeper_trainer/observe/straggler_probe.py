"""What a rank works itself for a step, told apart from what it waits for the others.

In a synchronous training every rank's step takes equally long, so only this names the rank that all wait for.

On a CPU it is the time in which the main thread ran, or was ready to run and got no processor, from the first forward
of the step on: waiting in gloo sleeps.  On a GPU it is the time between events around the forward, on a step a second,
read once they have come and never waited for; of `fully_shard` around each innermost part, behind its all-gather.  On
both, the time from a step's end to the first forward counts whole: loading data.

It tells slow nodes in data parallel training, replicated or sharded.  It does not under tensor, sequence or expert
parallelism on GPUs, whose forward waits for other ranks; stages of a pipeline differ by what they do, and the
supervisor compares places for that.  Where the model is compiled whole (`model.compile()`), hooks are not called: on a
CPU the whole step then counts by the processor's time, on a GPU nothing is told.  A process that is stopped by a
signal works no longer than others by this measure: training that stands still is seen otherwise.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.distributed.fsdp import FSDPModule

if TYPE_CHECKING:
    from collections.abc import Callable

    from stepkeeper_trainer.save.saver import Saver


WARM_UP_STEPS = 3  # compile, load, fill caches
SAMPLE_EVERY_S = 1.0  # on a GPU
PAIRS_MAX = 1024  # of events in one step
_SCHEDSTAT = "/proc/thread-self/schedstat"


class Own(NamedTuple):
    """What a rank works itself for a step, in seconds."""

    seconds: float
    loading: float  # of them, before the first forward


class StragglerProbe:
    """Of one rank; used by its main thread alone."""

    def __init__(self, model: torch.nn.Module | None, saver: Callable[[], Saver | None]) -> None:
        """Look at the model's forwards, where one is given; `saver` is asked whether a save disturbs a step."""
        self._saver = saver
        self._steps = 0  # measured or not
        self._disturbed = False
        self._sequence = 0  # of the newest save that was seen
        self._begun_at = time.monotonic()
        self._begun_clock = 0.0
        self._forward: tuple[float, float] | None = None  # wall and own clock at the first forward of this step
        self._sum, self._loading, self._count = 0.0, 0.0, 0
        self._delays: int | None = None  # descriptor
        self._device = _Device(model) if model is not None and torch.cuda.is_available() else None
        # before all others: that of `fully_shard` gathers parameters, and waits there for the rank that loads data
        if model is not None:
            model.register_forward_pre_hook(self._on_forward, prepend=True)

    def restart(self) -> None:
        """Begin: the first step counts from here."""
        self._steps, self._sum, self._loading, self._count = 0, 0.0, 0.0, 0
        self._begun_at, self._begun_clock, self._forward = time.monotonic(), self._clock(), None

    def disturb(self) -> None:
        """Have the step at hand not count: an evaluation came in between."""
        self._disturbed = True

    def step(self, now: float) -> None:
        """Take in a step that ended at `now` (monotonic seconds)."""
        saver = self._saver()
        if saver is not None and (saver.busy or saver.sequence != self._sequence):
            self._sequence, self._disturbed = saver.sequence, True
        self._steps += 1
        counts = self._steps > WARM_UP_STEPS and not self._disturbed
        clock = self._clock()
        forward_at, forward_clock = self._forward or (self._begun_at, self._begun_clock)
        loading = forward_at - self._begun_at
        if self._device is not None:
            own = self._device.step(now, loading if counts and self._forward is not None else None)
        else:
            own = Own(loading + max(0.0, clock - forward_clock), loading) if counts else None
        if own is not None:
            self._sum += own.seconds
            self._loading += own.loading
            self._count += 1
        self._begun_at, self._begun_clock, self._forward = now, clock, None
        self._disturbed = False

    def take(self) -> Own | None:
        """Return the mean of the steps since it was taken last; None where none counted."""
        mean = Own(self._sum / self._count, self._loading / self._count) if self._count else None
        self._sum, self._loading, self._count = 0.0, 0.0, 0
        return mean

    def _on_forward(self, *_: object) -> None:
        if self._forward is None and not torch.compiler.is_compiling():
            self._forward = time.monotonic(), self._clock()

    def _clock(self) -> float:
        """Return the seconds in which this thread ran, or was ready to and got no processor."""
        if self._device is not None:
            return 0.0
        return time.thread_time() + self._delayed()

    def _delayed(self) -> float:
        """Return how long this thread was ready and got no processor; 0 where the kernel does not say."""
        try:
            if self._delays is None:
                self._delays = os.open(_SCHEDSTAT, os.O_RDONLY | os.O_CLOEXEC)
            return int(os.pread(self._delays, 128, 0).split()[1]) / 1e9
        except (OSError, IndexError, ValueError):
            self._delayed = lambda: 0.0  # type: ignore[method-assign]
            return 0.0


class _Device:
    """Events around forwards on a GPU."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._open = False  # this step is measured
        self._pairs: list[tuple[Any, Any]] = []
        self._waiting: tuple[float, list[tuple[Any, Any]]] | None = None  # loading, and events that may not have come
        self._sampled_at = 0.0
        for part in parts(model):
            part.register_forward_pre_hook(self._before)
            part.register_forward_hook(self._after)

    def step(self, now: float, loading: float | None) -> Own | None:
        """Return the own time of a step that was measured, once its events have come."""
        own = None
        if self._waiting is not None and self._waiting[1][-1][1].query():
            before, pairs = self._waiting
            own = Own(before + sum(first.elapsed_time(last) for first, last in pairs) / 1000, before)
            self._waiting = None
        pairs = [pair for pair in self._pairs if pair[1] is not None]
        if self._open and loading is not None and pairs and self._waiting is None:
            self._waiting = loading, pairs
        self._pairs = []
        self._open = self._waiting is None and now - self._sampled_at >= SAMPLE_EVERY_S
        if self._open:
            self._sampled_at = now
        return own

    def _before(self, *_: object) -> None:
        if (
            not torch.compiler.is_compiling()
            and self._open
            and torch.is_grad_enabled()
            and len(self._pairs) < PAIRS_MAX
            and not torch.cuda.is_current_stream_capturing()  # such an event never comes, and asking for it fails
        ):
            self._pairs.append((_recorded(), None))

    def _after(self, *_: object) -> None:
        if not torch.compiler.is_compiling() and self._open and self._pairs and self._pairs[-1][1] is None:
            self._pairs[-1] = self._pairs[-1][0], _recorded()


def parts(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the modules whose forwards wait for nobody: the innermost sharded ones, else the model."""
    sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
    inner = [
        module
        for module in sharded
        if not any(isinstance(other, FSDPModule) and other is not module for other in module.modules())
    ]
    return list(inner) or [model]


def _recorded() -> Any:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event
