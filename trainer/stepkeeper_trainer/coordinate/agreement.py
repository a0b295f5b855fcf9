"""How ranks agree: a few integers, all-reduced by MAX on a gloo group of their own, from the main thread.

Issued at the boundary of one step and read at the next, so nobody waits; all ranks read the same, so all
save and stop at the same step.  A process alone agrees with itself at once.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import timedelta
from enum import IntEnum
from typing import Any

import torch
import torch.distributed as dist

from stepkeeper_trainer.coordinate import objects

AGREE_WITHIN_S = 3600.0  # longer than any evaluation that one rank does by itself
_NO_DEADLINE = -(1 << 62)


class Want(IntEnum):
    """What a rank was asked for; the larger one wins."""

    NOTHING = 0
    DUE = 1  # a periodic save, by rank 0's clock
    SAVE = 2
    STOP = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What one rank knows, and what all know together: reduced by MAX, deadlines to the earliest."""

    want: Want = Want.NOTHING
    deadline_at: float | None = None  # Unix seconds
    request_id: int = 0
    busy: bool = False  # a save is in flight
    failed_save: int = 0  # sequence number of a save that came to nothing on this rank
    sequence: int = 0  # of the newest save that was begun
    broken: bool = False  # the group that saves use has failed on this rank
    committed: int = 0  # sequence number of the newest commit (rank 0 knows)
    held: bool = False  # periodic saves wait: storage has failed on this rank
    drifted: bool = False  # ranks hold different values under one name, and it is not known which (rank 0)
    divided: bool = False  # it is known, and not yet in force

    def pack(self) -> list[int]:
        """Return the integers to reduce."""
        deadline = _NO_DEADLINE if self.deadline_at is None else -int(self.deadline_at * 1000)
        return [
            int(self.want),
            deadline,
            self.request_id,
            int(self.busy),
            self.failed_save,
            self.sequence,
            int(self.broken),
            self.committed,
            int(self.held),
            int(self.drifted),
            int(self.divided),
        ]

    @staticmethod
    def unpack(values: list[int]) -> Wish:
        """Read reduced integers."""
        want, deadline, request_id, busy, failed_save, sequence, broken, committed, held, drifted, divided = values
        return Wish(
            want=Want(want),
            deadline_at=None if deadline == _NO_DEADLINE else -deadline / 1000,
            request_id=request_id,
            busy=bool(busy),
            failed_save=failed_save,
            sequence=sequence,
            broken=bool(broken),
            committed=committed,
            held=bool(held),
            drifted=bool(drifted),
            divided=bool(divided),
        )


class Agreement:
    """One question in flight at a time."""

    def __init__(self, group: Any | None) -> None:
        """Take a gloo group of all ranks; None for a process alone."""
        self._group = group
        self._tensor: torch.Tensor | None = None
        self._work: Any = None

    @property
    def group(self) -> Any | None:
        """The gloo group of all ranks; None for a process alone."""
        return self._group

    def read(self, own: Wish) -> Wish:
        """Return what all ranks said at the boundary before; alone, what this one says now.

        Raises:
            RuntimeError: another rank died.
        """
        if self._group is None:
            return own
        if self._work is None:
            return Wish()
        self._work.wait()
        assert self._tensor is not None
        values = [int(value) for value in self._tensor.tolist()]
        self._work = self._tensor = None
        return Wish.unpack(values)

    def issue(self, own: Wish) -> None:
        """Say what this rank knows now; all ranks call it equally often."""
        if self._group is None:
            return
        assert self._work is None, "the answer before was not read"
        self._tensor = torch.tensor(own.pack(), dtype=torch.int64)
        self._work = dist.all_reduce(self._tensor, op=dist.ReduceOp.MAX, group=self._group, async_op=True)

    def settle(self, value: int, *, within_s: float) -> int:
        """Return the largest `value` of all ranks, waiting for them.

        Raises:
            RuntimeError: another rank died, or did not come within `within_s`.
        """
        return self.settle_all([value], within_s=within_s)[0]

    def settle_all(self, values: list[int], *, within_s: float) -> list[int]:
        """Return the largest of each value of all ranks, waiting for them: not at an ordinary step.

        Raises:
            RuntimeError: another rank died, or did not come within `within_s`.
        """
        if self._group is None:
            return values
        tensor = torch.tensor(values, dtype=torch.int64)
        work = dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self._group, async_op=True)
        limit_at = time.monotonic() + within_s
        work.wait(timedelta(seconds=max(0.1, limit_at - time.monotonic())))
        return [int(value) for value in tensor.tolist()]

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's `value` on every rank (at start-up)."""
        if self._group is None:
            return [value]
        return objects.all_gather(value, self._group)

    def share(self, value: Any) -> Any:
        """Return rank 0's `value` on every rank (at start-up)."""
        if self._group is None:
            return value
        return objects.broadcast(value, self._group)
