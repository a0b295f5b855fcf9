"""The host in the place of a GPU: its streams do at once what they are given, and its memory has a budget."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator

import torch


class HostLane:
    """What a snapshot needs of a device; `order` is what it was asked for."""

    def __init__(self, spare: int = 0, *, memory: int | None = None) -> None:
        self.spare, self.memory = spare, spare if memory is None else memory
        self.order: list[str] = []
        self.buffers: list[weakref.ref[torch.Tensor]] = []
        self.marks: list[HostMark] = []

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        yield

    @contextlib.contextmanager
    def beside(self) -> Iterator[None]:
        self.order.append("beside")
        yield
        self.order.append("training")

    def follow_training(self) -> None:
        self.order.append("beside follows training")

    def spare_bytes(self) -> int:
        return self.spare

    def buffer(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        self.memory -= count * dtype.itemsize
        if self.memory < 0:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        buffer = torch.empty(count, dtype=dtype)
        self.buffers.append(weakref.ref(buffer))
        self.order.append("buffer")
        return buffer

    def mark(self) -> HostMark:
        self.marks.append(HostMark(self, len(self.marks)))
        self.order.append(f"mark {len(self.marks) - 1}")
        return self.marks[-1]


class HostMark:
    def __init__(self, lane: HostLane, number: int) -> None:
        self.lane, self.number = lane, number
        self.error: Exception | None = None

    def hold_training(self) -> None:
        self.lane.order.append(f"training waits for mark {self.number}")

    def wait(self) -> None:
        self.lane.order.append(f"the host waits for mark {self.number}")
        if self.error is not None:
            raise self.error
