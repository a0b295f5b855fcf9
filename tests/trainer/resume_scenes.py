"""Ranks of which one is slow at a resume: scenes for `test_other_worlds`."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from stepkeeper_trainer import CheckpointManager
from stepkeeper_trainer.coordinate import groups
from stepkeeper_trainer.load import reader
from stepkeeper_trainer.load import resume as resuming
from stepkeeper_trainer.load.worker import Limits
from tests.trainer.worlds import Kinds, build, kinds, wrong

SAVE_WITHIN_S = 1.0
SLOW_S = 3.0  # one rank is behind by so much, each time that the others wait for it


def slow_rank(rank: int, directory: Path) -> int:
    """Verify and load the newest step together, one rank far more slowly than a save may take."""
    groups.new_group = _strict(groups.new_group)  # type: ignore[assignment]
    if rank == 1:
        resuming.verify_shard = _late(resuming.verify_shard)
        reader.fill = _late(reader.fill)
    print(f"rank {rank}: wrong: {wrong(*_resume(directory, save_within_s=SAVE_WITHIN_S))}", flush=True)
    return 0


def limited(rank: int, directory: Path, *, gib: float) -> int:
    """Resume with a limit on a node's memory, and say how much of it this rank gives to a load."""
    load = resuming.load

    def told(*arguments: Any, limits: Limits | None = None) -> None:
        assert limits is not None
        print(f"rank {rank} may take {limits.memory_bytes}", flush=True)
        load(*arguments, limits=limits)

    resuming.load = told  # type: ignore[assignment]
    _resume(directory, load_memory_gib=gib)
    return 0


def _resume(directory: Path, **options: Any) -> tuple[Any, Any]:
    """Return the model and the optimizer as the newest step has them."""
    model, optimizer = build(dist.get_world_size())
    state = {"model": model, "optimizer": optimizer, "kinds": Kinds(kinds())}
    manager = CheckpointManager(state, run_dir=directory, resume_from="latest", **({"every": None} | options))
    assert manager.resume() == 1
    return model, optimizer


def _strict(new_group: Callable[[float], Any]) -> Callable[[float], Any]:
    """Have a group wait for as long as it was asked to, also where that is less than ranks may need to connect."""

    def made(within_s: float) -> Any:
        group = new_group(within_s)
        group.reduce_max(torch.zeros(1))
        for level in group.levels:
            level.gloo._get_backend(torch.device("cpu"))._set_default_timeout(timedelta(seconds=within_s))
        return group

    return made


def _late(act: Callable[..., Any]) -> Callable[..., Any]:
    def later(*arguments: Any, **options: Any) -> Any:
        time.sleep(SLOW_S)
        return act(*arguments, **options)

    return later
