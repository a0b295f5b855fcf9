"""A training loop that forgives no inexact resume, and is interrupted: a scene for `test_exact_resume`.

Every rank draws from all of its generators, dropout included; gradients are accumulated, clipped and sharded; the
learning rate changes in each step, and the data are shuffled.
"""

from __future__ import annotations

import functools
import importlib
import os
import random
import re
import signal
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from stepkeeper_trainer import CheckpointManager, GlobalSampler

EVERY = 3
MICRO_BATCHES = 3  # of each rank, in a step
SAMPLES = 4  # of a micro-batch
WIDTH = 24
LATE_S = 25.0  # the other rank waits for 30 s
How = Literal["kill", "term", "in flight"]


@dataclass(frozen=True, kw_only=True)
class Fall:
    """What befalls a launch: in a micro-batch of a step, or as soon as a save is in flight after it."""

    how: How
    step: int  # that is not done yet
    micro_batch: int
    ranks: tuple[int, ...]  # whom it befalls
    committed: int = 0  # a step that is waited for before

    def arguments(self) -> dict[str, Any]:
        return {"fall": asdict(self)}


def train(
    rank: int,
    directory: Path,
    *,
    steps: int,
    resume_from: str | None = None,
    fall: dict[str, Any] | None = None,
    hit: dict[str, Any] | None = None,
) -> int:
    """Train to the end or until something befalls."""
    if hit is not None and hit.pop("rank") == rank:
        _arm(**hit)
    mine = Fall(**fall) if fall is not None and rank in fall["ranks"] else None
    writing = _slow_disk(mine)
    torch.use_deterministic_algorithms(mode=True)
    torch.manual_seed(0)  # weights are the same on all ranks
    model = nn.Sequential(
        nn.Linear(WIDTH, 37), nn.GELU(), nn.Dropout(0.2), nn.Linear(37, WIDTH), nn.Dropout(0.2), nn.Linear(WIDTH, 1)
    )
    data = torch.rand(101, WIDTH)
    for layer in (model[0], model[3]):
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    sampler = GlobalSampler(len(data), seed=5, fingerprint="exact")
    torch.manual_seed(1000 + rank)
    random.seed(2000 + rank)
    np.random.seed(3000 + rank)  # noqa: NPY002  # what scripts share
    manager = CheckpointManager(
        {"model": model, "optimizer": optimizer, "scheduler": scheduler, "sampler": sampler},
        every=EVERY,
        run_dir=directory,
        resume_from=resume_from,
        total_steps=steps,
        save_within_s=20.0,
        attach_signals=True,
    )
    manager.resume()
    print(f"rank {rank}: goes on from {manager.step}", flush=True)
    try:
        done = manager.finished
        while not done:
            losses = []
            for number in range(MICRO_BATCHES):
                if mine is not None and mine.step == manager.step + 1 and mine.micro_batch == number:
                    _befall(mine, manager, directory, writing)
                assert isinstance(model, FSDPModule)
                model.set_requires_gradient_sync(number == MICRO_BATCHES - 1)
                samples = sampler.micro_batch(rank * MICRO_BATCHES + number, SAMPLES)
                noise = 0.1 * random.gauss(0, 1) + 0.1 * float(np.random.rand())  # noqa: NPY002
                loss = (model(data[list(samples)] + noise) - data[list(samples)].sum(1, keepdim=True)).square().mean()
                (loss / MICRO_BATCHES).backward()
                losses.append(loss.detach())
            total = torch.stack(losses).sum()
            dist.all_reduce(total)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            lr = scheduler.get_last_lr()[0]
            scheduler.step()
            sampler.advance(SAMPLES * MICRO_BATCHES * dist.get_world_size())
            done = manager.step_done(loss=total.item(), lr=lr)
        return manager.finish()
    except RuntimeError as error:  # the other rank is gone
        print(f"rank {rank}: left alone: {str(error).splitlines()[0]}", flush=True)
        return 1  # at once, as a launcher would end it: a save that it could still finish is given up


def _befall(fall: Fall, manager: CheckpointManager, directory: Path, writing: threading.Event) -> None:
    limit_at = time.monotonic() + LATE_S
    while fall.committed and not (directory / f"checkpoints/step_{fall.committed:08d}").exists():
        assert time.monotonic() < limit_at, "the save has no end"
        time.sleep(0.001)
    if fall.how == "term":
        os.kill(os.getpid(), signal.SIGTERM)
        return
    if fall.how == "in flight":
        while not writing.is_set():
            if time.monotonic() > limit_at or manager._saver is None or not manager._saver.busy:
                break
            time.sleep(0.0005)
        else:
            print("killed with a save in flight", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


def _arm(place: str, number: int, *, how: str) -> None:
    """Have this process killed or stopped as it comes to a place of the library, the so manieth time."""
    module, _, attribute = place.partition(":")
    *owners, name = attribute.split(".")
    holder = functools.reduce(getattr, owners, importlib.import_module(f"stepkeeper_trainer.{module}"))
    original = getattr(holder, name)
    calls = 0

    def counted(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == number:
            print("hit", flush=True)
            signal.pthread_kill(threading.get_ident(), signal.SIGKILL if how == "kill" else signal.SIGSTOP)
        return original(*arguments, **options)

    setattr(holder, name, counted)


def _slow_disk(fall: Fall | None) -> threading.Event:
    """Have saves last for longer than a step or two, and the one that is to be in flight until this rank is killed.

    Returns what is set when that one is being written.
    """
    sync, writing = os.fsync, threading.Event()
    held = f"/.tmp-step_{fall.step - 1:08d}." if fall is not None and fall.how == "in flight" else None

    def slow(descriptor: int) -> None:
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        if re.search(r"\.distcp$", path):
            time.sleep(0.06)
            if held is not None and held in path:
                writing.set()
                time.sleep(2 * LATE_S)
        sync(descriptor)

    os.fsync = slow
    return writing
