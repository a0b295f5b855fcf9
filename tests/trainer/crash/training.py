"""A training whose state after each step is known beforehand, on any number of ranks, to the last bit."""

from __future__ import annotations

import hashlib
import logging
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from stepkeeper_trainer import CheckpointManager
from stepkeeper_trainer.observe import metrics
from stepkeeper_trainer.save import persist, writer
from stepkeeper_trainer.store import space
from tests.trainer.crash.playing import Tell

WIDTH = 40
SAVED_WITHIN_S = 90.0


class Training:
    """A sharded layer, a replicated one, a frozen one, and AdamW."""

    def __init__(self, rows: int = 0) -> None:
        """Build it; `rows` of a further layer make the state so large that it is written past the page cache."""
        torch.set_num_threads(1)
        layers = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(3)]
        self.rows = rows
        self.model = torch.nn.Sequential(*layers, *([torch.nn.Linear(WIDTH, rows)] if rows else []))
        for parameter in self.model.parameters():
            torch.nn.init.constant_(parameter, 0.5)
        self.model[2].requires_grad_(requires_grad=False)
        if dist.is_initialized():
            fully_shard(self.model[0])
        # with these, and gradients of one, no number is ever rounded
        moving = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(moving, lr=0.5, betas=(0.5, 0.5), weight_decay=0.0)

    def step(self, number: int) -> None:
        """Do optimizer step `number`, from 1."""
        for parameter in self.optimizer.param_groups[0]["params"]:
            parameter.grad = torch.ones_like(parameter)
        self.optimizer.step()
        with torch.no_grad():
            for parameter in self.optimizer.param_groups[0]["params"]:
                parameter.fill_(number / 8)

    def digest(self) -> str:
        """Return what stands for every bit of the state; of a model that is not sharded."""
        found = hashlib.sha256()
        states = self.optimizer.state
        tensors: dict[str, Any] = dict(self.model.state_dict())
        for number, parameter in enumerate(self.optimizer.param_groups[0]["params"]):
            tensors |= {f"{number}.{name}": value for name, value in states.get(parameter, {}).items()}
        for name, value in sorted(tensors.items()):
            found.update(name.encode() + b"\0" + value.detach().contiguous().numpy().tobytes())
        return found.hexdigest()


def digests(count: int, rows: int = 0) -> dict[int, str]:
    """Return the digest of the state after each step."""
    training, found = Training(rows), {}
    for number in range(1, count + 1):
        training.step(number)
        found[number] = training.digest()
    return found


def keep(training: Training, run_dir: Path, *, rank: int = 0, **options: Any) -> CheckpointManager:
    """Return a manager of small files; nothing beside its saves changes the directory."""
    logging.basicConfig(format=f"[{rank}] %(message)s", level=logging.INFO, stream=sys.stderr, force=True)
    persist.FILE_BYTES_MIN = 1 << 30 if training.rows else 20_000  # one file that is large, or several small ones
    writer.WRITE_BYTES = 1 << 20  # of a large one at once: several calls
    space.MARGIN_BYTES = 0  # a disk is as small as can be
    usual = {"resume_from": "latest", "save_within_s": SAVED_WITHIN_S, "retention": "all", "storage_test": "off"}
    return CheckpointManager(
        {"model": training.model, "optimizer": training.optimizer},
        run_dir=run_dir,
        **({"every": None} | usual | options),
    )


def train(
    run_dir: Path,
    upto: int,
    tell: Tell,
    *,
    rank: int = 0,
    world_size: int = 1,
    rows: int = 0,
    late_s: float = 0.0,
    **options: Any,
) -> None:
    """Resume, save each step from there on, wait for each save, and finish."""
    if world_size > 1:
        store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), world_size, is_master=rank == 0)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=60))
    training = Training(rows)
    manager = keep(training, run_dir, rank=rank, every=1, total_steps=upto, **options)
    manager.resume()
    assert manager._saver is not None
    if late_s:
        make_way = manager._saver._make_way
        manager._saver._make_way = lambda *given: (time.sleep(late_s), make_way(*given))[1]  # type: ignore[method-assign]
    if world_size == 1:
        tell(resumed=manager.step, digest=training.digest())
    while not manager.finished:
        training.step(manager.step + 1)
        manager.step_done(loss=1.0)
        manager.wait_saved(SAVED_WITHIN_S)
    manager.finish()
    tell(finished=manager.step)


def train_on(run_dir: Path, saves: int, steps_max: int, tell: Tell) -> None:
    """Save after each step, whatever becomes of it; end when enough saves were made and the last one was good."""
    metrics.SYNC_WITHIN_S = metrics.RETRY_S = 0.1
    training = Training()
    manager = keep(training, run_dir)
    manager.resume()
    good = False
    while manager.step < steps_max and not (good and manager.step >= saves):
        training.step(manager.step + 1)
        manager.step_done(loss=1.0)
        tell(stepped=manager.step)
        manager.save()
        good = manager.wait_saved(SAVED_WITHIN_S)
        time.sleep(0.0 if good else 0.02)
    manager.finish()
