"""Numbers that a device is still computing: read a step later, when nobody has to wait for them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.distributed.tensor import DTensor

if TYPE_CHECKING:
    from collections.abc import Callable

Number = float | torch.Tensor | None


def whole(value: Number) -> Number:
    """Return a sharded number as a plain tensor; all ranks call it."""
    return value.full_tensor() if isinstance(value, DTensor) else value


class Later:
    """A copy of a number, as it is at this point of the device's stream."""

    def __init__(self, value: Number) -> None:
        """Copy it without waiting for the device: the script may write over its own."""
        self.ready = True
        self._read: Callable[[], float | None]
        if value is None or not isinstance(value, torch.Tensor) or value.device.type == "cpu":
            number = None if value is None else float(value)
            self._read = lambda: number
            return
        self.ready = False
        value = value.detach()
        if value.device.type != "cuda":
            copy = value.clone()
            self._read = lambda: float(copy)
            return
        pinned = torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
        pinned.copy_(value, non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(value.device))

        def read() -> float:
            event.synchronize()
            return float(pinned)

        self._read = read

    def read(self) -> float | None:
        """Return the number, waiting for the device where it has not come so far."""
        return self._read()
