"""The two streams of a GPU that a snapshot uses: the one that training uses, and one beside it.

All that knows CUDA is here, so that everything else of a snapshot runs on any device.
"""

from __future__ import annotations

import ctypes
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager


MARGIN_BYTES = 1024**3  # left free, or a twentieth where that is more: for NCCL, libraries, and a longer batch
MARGIN_PART = 20
_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED


class Mark(Protocol):
    """A point in the stream beside training."""

    def hold_training(self) -> None:
        """Let the device do what it is given next by training only after this point."""

    def wait(self) -> None:
        """Wait in this thread until the device has come here.  Raises RuntimeError for an error of the device."""


class Lane(Protocol):
    """The streams of one device."""

    def current(self) -> AbstractContextManager[object]:
        """Make the device the current one."""

    def beside(self) -> AbstractContextManager[object]:
        """Have what is issued go to the stream beside training."""

    def follow_training(self) -> None:
        """Let the stream beside wait for what training was given until now."""

    def spare_bytes(self) -> int:
        """Return how much memory of the device a snapshot may take for a while."""

    def buffer(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Return memory that training fills and the stream beside reads; it is free again once both have.

        Raises torch.cuda.OutOfMemoryError.
        """

    def mark(self) -> Mark:
        """Return the point that the stream beside has reached when all that it was given is done."""


def spare(*, free: int, total: int, kept: int) -> int:
    """Return how much of a device's memory a snapshot may take for a while.

    `free` is what no process has, and `kept` what the allocator keeps of the snapshot before.  The rest of the
    allocator's unused memory is left alone: training had it at its peak, and needs it again in the next step.
    """
    return max(0, free + kept - max(MARGIN_BYTES, total // MARGIN_PART))


class CudaLane:
    """The streams of one GPU."""

    def __init__(self, device: torch.device) -> None:
        """Make the stream beside; once for each GPU."""
        self._device = device
        self._beside = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._taken = self._flushes = 0  # bytes of the snapshot before, and the allocator's count then

    def current(self) -> AbstractContextManager[object]:
        """Make the GPU the current one."""
        return torch.cuda.device(self._device)

    def beside(self) -> AbstractContextManager[object]:
        """Have what is issued go to the stream beside."""
        return torch.cuda.stream(self._beside)

    def follow_training(self) -> None:
        """Let the stream beside wait for what the GPU's current stream was given until now."""
        self._beside.wait_stream(torch.cuda.current_stream(self._device))

    def spare_bytes(self) -> int:
        """Return how much memory a snapshot may take: see `spare`."""
        free, total = torch.cuda.mem_get_info(self._device)
        stats = torch.cuda.memory_stats_as_nested_dict(self._device)
        unused = stats["reserved_bytes"]["all"]["current"] - stats["active_bytes"]["all"]["current"]
        flushes = stats["num_alloc_retries"]  # each gave all unused memory back to the device, ours too
        kept = min(self._taken, unused) if flushes == self._flushes else 0
        self._taken, self._flushes = 0, flushes
        return spare(free=free, total=total, kept=kept)

    def buffer(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Return memory of the stream beside: no block that training reuses is split for it.

        Where training runs out of memory before the buffer is free again, the allocator waits for it, and takes it.
        """
        training = torch.cuda.current_stream(self._device)
        with torch.cuda.stream(self._beside):
            buffer = torch.empty(count, dtype=dtype, device=self._device)
        training.wait_stream(self._beside)  # torch has 32 streams: this may be another one's too, and so may the block
        buffer.record_stream(training)
        self._taken += buffer.nbytes
        return buffer

    def mark(self) -> Mark:
        """Record an event in the stream beside."""
        return CudaMark(self._device, self._beside)


def cuda_lane(device: torch.device) -> Lane | None:
    """Return the streams of a device, if it is a GPU."""
    return CudaLane(device) if device.type == "cuda" else None


class CudaMark:
    """An event of a GPU."""

    def __init__(self, device: torch.device, stream: torch.cuda.Stream) -> None:
        """Record it in a stream."""
        self._device = device
        self._event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # who waits takes no core
        self._event.record(stream)

    def hold_training(self) -> None:
        """Let training's current stream wait, unless a graph is captured there: what is captured is not run now."""
        with torch.cuda.device(self._device):
            if not torch.cuda.is_current_stream_capturing():
                torch.cuda.current_stream().wait_event(self._event)

    def wait(self) -> None:
        """Wait for it in this thread."""
        with allowed_during_capture(), torch.cuda.device(self._device):  # else a context on the first GPU is made
            self._event.synchronize()


@contextmanager
def allowed_during_capture() -> Iterator[None]:
    """Let this thread wait for events and register memory while another one captures a CUDA graph.

    In torch's usual (global) mode of a capture such a call of any thread fails, and breaks the capture.  No graph
    depends on these calls, so CUDA need not check them: the relaxed mode counts for the calling thread alone.
    """
    exchange = _find_exchange()
    mode = ctypes.c_int(_RELAXED)
    exchanged = exchange is not None and exchange(ctypes.byref(mode)) == 0  # `mode` is now what it was before
    try:
        yield
    finally:
        if exchange is not None and exchanged:
            exchange(ctypes.byref(mode))


@cache
def _find_exchange() -> Callable[..., int] | None:
    try:
        return ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode
    except (OSError, AttributeError):
        return None  # no driver of NVIDIA, or one before CUDA 10.1
