"""Ranks that a notice finds far from the end of their step: scenes for `test_notice_anywhere`."""

from __future__ import annotations

import hashlib
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from stepkeeper_trainer import CheckpointManager, GlobalSampler
from stepkeeper_trainer.coordinate import between
from stepkeeper_trainer.formats.steps import list_steps
from stepkeeper_trainer.tiers.tier import Tiers
from tests.trainer.any_state import leaves

PAUSE_MAX_S = 60.0  # of the main thread, unless the step was saved before
STEPS = 3  # that are done when the notice comes


def ranks() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


class Training:
    """Everything that has a state: sharded weights, buffers, a schedule, a position, generators."""

    def __init__(self) -> None:
        torch.manual_seed(7)
        self.model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Dropout(0.2), torch.nn.Linear(16, 1))
        if ranks() > 1:
            fully_shard(self.model)
        self.norm = torch.nn.BatchNorm1d(16)  # its buffers change in each forward
        self.optimizer = torch.optim.AdamW([*self.model.parameters(), *self.norm.parameters()], lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 100)
        self.sampler = GlobalSampler(1000, seed=3)
        torch.manual_seed(dist.get_rank() if ranks() > 1 else 0)

    @property
    def state(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "norm": self.norm,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "sampler": self.sampler,
        }

    def step(self) -> float:
        x = self.norm(torch.rand(8, 16) + sum(self.sampler.micro_batch(0, 4)) / 1000)
        loss = self.model(x).square().mean()
        loss.backward()
        if ranks() > 1:
            for parameter in self.norm.parameters():
                dist.all_reduce(parameter.grad)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        self.sampler.advance(4)
        return float(loss.detach())

    def fingerprint(self) -> str:
        digest = hashlib.blake2b(digest_size=8)
        for value in leaves([self.state, torch.get_rng_state()]):
            digest.update(value)
        return digest.hexdigest()


def interrupted(rank: int, directory: Path, *, where: str, resume: bool = False) -> int:
    """Train, and be told to stop in a place that is far from the end of a step; leave without having come there."""
    between.PATIENCE_S = 0.2
    training = Training()
    manager = CheckpointManager(
        training.state,
        every=None,
        run_dir=directory,
        total_steps=100,
        storage_test="off",
        resume_from="latest" if resume else None,
        attach_signals=True,
    )
    manager.resume()
    if resume:
        print(f"[{rank}] resumed {manager.step} {training.fingerprint()}", flush=True)
        return 0
    if where == "warm-up":
        os.kill(os.getpid(), signal.SIGTERM)
        return _stand(1.0)
    for step in manager.steps():
        if step == STEPS:
            break
        manager.step_done(loss=training.step())
        print(f"[{rank}] done {manager.step} {training.fingerprint()}", flush=True)
    return PLACES[where](rank, directory, training, manager)


def _told(delay_s: float = 0.0) -> None:
    """Have the notice come, by a signal that Slurm sends to all processes of a step."""
    if delay_s:
        threading.Timer(delay_s, os.kill, (os.getpid(), signal.SIGTERM)).start()
    else:
        os.kill(os.getpid(), signal.SIGTERM)


def _stand(seconds: float) -> int:
    time.sleep(seconds)
    return 9


def _until_saved(directory: Path, saved: int = STEPS) -> int:
    """Do not come to the end of the step; 9 as soon as the last one is saved."""
    limit_at = time.monotonic() + PAUSE_MAX_S
    while time.monotonic() < limit_at:
        if any(step.step == saved for step in list_steps(directory / "checkpoints")):
            return 9
        time.sleep(0.05)
    return 1


def from_memory(rank: int, directory: Path, *, memory: str, resume: bool) -> int:
    """Take a snapshot and leave; resume from it, and be told to stop in the first step, which has no end."""
    between.PATIENCE_S = 0.2
    training = Training()
    manager = CheckpointManager(
        training.state,
        every=1000,
        run_dir=directory,
        total_steps=100,
        storage_test="off",
        tiers=Tiers(snapshot_every="1 steps", snapshot_directory=memory),
        resume_from="latest" if resume else None,
        attach_signals=True,
    )
    manager.resume()
    if resume:
        print(f"[{rank}] in memory {manager.step}", flush=True)
        _told()
        return _until_saved(directory, manager.step)
    taken = torch.zeros(1)
    while not taken and manager.step < 50:
        manager.step_done(loss=training.step())
        print(f"[{rank}] done {manager.step} {training.fingerprint()}", flush=True)
        time.sleep(0.1)
        taken = torch.tensor([float(bool(list(Path(memory).glob("*/run.*/checkpoints/step_*"))))])
        dist.broadcast(taken, 0)
    return 9


def evaluation(_rank: int, directory: Path, training: Training, _manager: CheckpointManager) -> int:
    """Draws random numbers, in forwards of all ranks, for minutes."""
    _told()
    training.model.eval()
    limit_at = time.monotonic() + PAUSE_MAX_S
    saved = torch.zeros(1)
    while not saved and time.monotonic() < limit_at:
        with torch.no_grad():
            training.model(torch.rand(8, 16))
        saved = torch.tensor([float(any(s.step == STEPS for s in list_steps(directory / "checkpoints")))])
        dist.all_reduce(saved)
    return 9 if saved else 1


def loader(rank: int, directory: Path, _training: Training, _manager: CheckpointManager) -> int:
    """Rank 1 waits for its data, the others wait for rank 1 in a collective."""
    _told()
    if rank == 1:
        return _until_saved(directory)
    dist.all_reduce(torch.ones(1))  # fails when rank 1 has left
    return 9


def compilation(_rank: int, directory: Path, _training: Training, _manager: CheckpointManager) -> int:
    """Python works without a pause, as a compiler does."""
    _told()
    limit_at = time.monotonic() + PAUSE_MAX_S
    while time.monotonic() < limit_at:
        sum(number * number for number in range(300_000))
        if any(step.step == STEPS for step in list_steps(directory / "checkpoints")):
            return 9
    return 1


def averaged(rank: int, directory: Path, training: Training, _manager: CheckpointManager) -> int:
    """Weights are swapped for others by `.data`, which no version counter sees: those must not be saved."""
    own = [parameter.detach().clone() for parameter in training.model.parameters()]
    for parameter in training.model.parameters():
        parameter.data.copy_(torch.zeros_like(parameter))
    _told()
    time.sleep(3.0)
    print(f"[{rank}] saved while swapped: {bool(list_steps(directory / 'checkpoints'))}", flush=True)
    for parameter, value in zip(training.model.parameters(), own, strict=True):
        parameter.data.copy_(value)
    return _until_saved(directory)


def normalised(rank: int, directory: Path, training: Training, manager: CheckpointManager) -> int:
    """The next forward has changed buffers already: the step's own end answers."""
    between.PATIENCE_S = between.PATIENCE_STEPS = 0
    training.norm(torch.rand(8, 16))
    _told()
    time.sleep(3.0)
    print(f"[{rank}] saved while changed: {bool(list_steps(directory / 'checkpoints'))}", flush=True)
    manager.step_done(loss=training.step())
    manager.step_done(loss=training.step())
    print(f"[{rank}] done {manager.step} {training.fingerprint()}", flush=True)
    return manager.finish()


def racing(rank: int, _directory: Path, training: Training, manager: CheckpointManager) -> int:
    """The notice comes to ranks that do quick steps, while their threads try at the same time."""
    between.PATIENCE_S = between.PATIENCE_STEPS = between.AGAIN_AFTER_S = 0
    _told(0.05 * rank)
    while not manager.step_done(loss=training.step()):
        print(f"[{rank}] done {manager.step} {training.fingerprint()}", flush=True)
    print(f"[{rank}] done {manager.step} {training.fingerprint()}", flush=True)
    return manager.finish()


PLACES = {
    "evaluation": evaluation,
    "loader": loader,
    "compilation": compilation,
    "averaged": averaged,
    "normalised": normalised,
    "racing": racing,
}
