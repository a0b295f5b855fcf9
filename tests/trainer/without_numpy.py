"""A training of two ranks that NumPy has no part in: replicated, two optimizers, two loaders with workers.

python -m tests.trainer.without_numpy RUN_DIR STEPS
"""

from __future__ import annotations

import importlib.util
import random
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from stepkeeper_trainer import CheckpointManager, GlobalSampler, start_distributed

WIDTH, HIDDEN = 64, 512  # of 128 KiB: compared between the ranks where it is
MICRO_BATCH = 4


class Rows(torch.utils.data.Dataset[torch.Tensor]):
    """Each differs from all others."""

    def __len__(self) -> int:
        return 53

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.linspace(0, index / 53, WIDTH)


def main() -> None:
    run_dir, steps = sys.argv[1:]
    check_that_numpy_is_missing()
    place = start_distributed()
    torch.use_deterministic_algorithms(mode=True)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Dropout(0.2), nn.Linear(HIDDEN, 1))
    replicated = DistributedDataParallel(model)
    optimizers = {
        "adamw": torch.optim.AdamW(model[0].parameters(), lr=0.01),
        "sgd": torch.optim.SGD(model[3].parameters(), lr=0.01, momentum=0.9),
    }
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizers["adamw"], int(steps))
    sampler = GlobalSampler(53, seed=5)
    stateful = StatefulDataLoader(Rows(), batch_size=MICRO_BATCH, num_workers=2, shuffle=True)  # each rank its own
    torch.manual_seed(100 + place.rank)
    manager = CheckpointManager(
        {"model": replicated, **optimizers, "scheduler": scheduler, "sampler": sampler, "loader": stateful},
        every=3,
        run_dir=Path(run_dir),
        retention="all",
        total_steps=int(steps),
    )
    manager.resume()
    batch = MICRO_BATCH * place.world_size
    batches = sampler.batches(batch=batch, micro_batch=MICRO_BATCH, rank=place.rank, world_size=place.world_size)
    first = iter(DataLoader(Rows(), batch_sampler=batches, num_workers=2))
    second = iter(stateful)
    manager.restore_random_state()
    done = manager.finished
    while not done:
        other = next(second, None)
        if other is None:
            second = iter(stateful)
            other = next(second)
        data = next(first)
        noise = 0.1 * random.random()  # noqa: S311
        loss = (replicated(data + other.mean(0) + noise) - data.sum(1, keepdim=True)).square().mean()
        loss.backward()
        for optimizer in optimizers.values():
            optimizer.step()
            optimizer.zero_grad()
        scheduler.step()
        sampler.advance(batch)
        total = loss.detach().clone()
        dist.all_reduce(total)
        done = manager.step_done(loss=total)
    check_that_numpy_is_missing()
    manager.finish()


def check_that_numpy_is_missing() -> None:
    assert importlib.util.find_spec("numpy") is None, "this environment has NumPy"
    with pytest.raises(RuntimeError, match="Numpy is not available"):
        torch.zeros(1).numpy()


if __name__ == "__main__":
    main()
