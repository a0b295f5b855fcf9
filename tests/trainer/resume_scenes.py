"""Ranks of which one is slow at a resume: scenes for `test_other_worlds`."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import _set_pg_timeout

from stepkeeper_trainer import Keeper, attach, reader, resuming
from stepkeeper_trainer.loading import Limits
from tests.trainer.worlds import Kinds, build, kinds, wrong

SAVE_WITHIN_S = 1.0
SLOW_S = 3.0  # one rank is behind by so much, each time that the others wait for it


def slow_rank(rank: int, directory: Path) -> int:
    """Verify and load the newest step together, one rank far more slowly than a save may take."""
    attach.new_group = _strict(attach.new_group)  # type: ignore[assignment]
    if rank == 1:
        resuming.verify_share = _late(resuming.verify_share)
        reader.fill = _late(reader.fill)
    model, optimizer = build(dist.get_world_size())
    keeper = Keeper(
        model=model,
        optimizer=optimizer,
        others={"kinds": Kinds(kinds())},
        run_dir=directory,
        resume_from="latest",
        save_within_s=SAVE_WITHIN_S,
    )
    assert keeper.resume() == 1
    print(f"rank {rank}: wrong: {wrong(model, optimizer)}", flush=True)
    return 0


def limited(rank: int, directory: Path, *, gib: float) -> int:
    """Resume with a limit on a node's memory, and say how much of it this rank gives to a load."""
    load = resuming.load

    def told(*arguments: Any, limits: Limits | None = None) -> None:
        assert limits is not None
        print(f"rank {rank} may take {limits.memory_bytes}", flush=True)
        load(*arguments, limits=limits)

    resuming.load = told  # type: ignore[assignment]
    model, optimizer = build(dist.get_world_size())
    keeper = Keeper(
        model=model,
        optimizer=optimizer,
        others={"kinds": Kinds(kinds())},
        run_dir=directory,
        resume_from="latest",
        load_memory_gib=gib,
    )
    assert keeper.resume() == 1
    return 0


def _strict(new_group: Callable[[float], Any]) -> Callable[[float], Any]:
    """Have a group wait for as long as it was asked to, also where that is less than ranks may need to connect."""

    def made(within_s: float) -> Any:
        group = new_group(within_s)
        dist.barrier(group)
        _set_pg_timeout(timedelta(seconds=within_s), group)
        return group

    return made


def _late(act: Callable[..., Any]) -> Callable[..., Any]:
    def later(*arguments: Any, **options: Any) -> Any:
        time.sleep(SLOW_S)
        return act(*arguments, **options)

    return later
