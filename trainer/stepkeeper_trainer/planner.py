"""Who writes what: planned by all ranks together once, and again when the state's layout changes.

DCP asks us for a plan in its save thread; the collectives run there, on a gloo group that nothing else
uses.  Between re-plannings one small all-reduce says that nothing has changed.
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata

from stepkeeper_trainer.errors import SaveError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed.checkpoint.planner import SavePlan


class CollectivePlanner(DefaultSavePlanner):
    """Kept for the whole launch.  `problem` is asked whether this rank cannot write at all."""

    def __init__(self, *, rank: int, world_size: int, group: Any | None) -> None:
        super().__init__()
        self.problem: Callable[[], str | None] = lambda: None
        self._rank = rank
        self._world_size = world_size
        self._group = group
        self._local: SavePlan | None = None  # what the plan in force was made from
        self._planned: tuple[SavePlan, Metadata] | None = None

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Return this rank's share, and on rank 0 the metadata of the whole.

        Raises:
            SaveError: some rank cannot write, or the plans contradict each other.
            RuntimeError: another rank died.
        """
        [local] = all_plans
        problem = self.problem()
        if self._any(changed=self._local != local, failed=problem is not None) or self._planned is None:
            self._local = self._planned = None
            self._planned = self._plan_together(local)
            self._local = local
        elif problem is not None:
            raise SaveError(problem)
        plan, metadata = self._planned
        return [plan], dataclasses.replace(metadata)  # the writer fills in its own copy

    def decline(self) -> None:
        """Take part where this rank could not even begin: the others hear of it, and none waits."""
        with contextlib.suppress(SaveError, RuntimeError):  # that is what the others are to hear
            self._any(changed=False, failed=True)

    def _any(self, *, changed: bool, failed: bool) -> bool:
        flags = torch.tensor([int(changed), int(failed)], dtype=torch.int64)
        if self._group is not None:
            dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self._group)
        if int(flags[1]):
            raise SaveError(self.problem() or "another rank cannot write")
        return bool(flags[0])

    def _plan_together(self, local: SavePlan) -> tuple[SavePlan, Metadata]:
        if self._group is None:
            plans, metadata = super().create_global_plan([local])
            return plans[0], metadata
        gathered: list[Any] | None = [None] * self._world_size if self._rank == 0 else None
        dist.gather_object(local, gathered, dst=0, group=self._group)
        shares: list[Any] | None = None
        metadata = Metadata({})
        if gathered is not None:
            try:
                plans, metadata = super().create_global_plan(gathered)
                shares = list(plans)
            except Exception as error:  # noqa: BLE001  # the others wait for their share: they get the error
                shares = [f"planning failed: {error}"] * self._world_size
        mine: list[Any] = [None]
        dist.scatter_object_list(mine, shares, src=0, group=self._group)
        if isinstance(mine[0], str):
            raise SaveError(mine[0])
        return mine[0], metadata
