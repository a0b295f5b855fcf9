"""Scripts that change their state right after `step_done`, while it is being written: scenes for `test_mutations`."""

from __future__ import annotations

import copy
import gc
import hashlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from stepkeeper_trainer import CheckpointManager
from stepkeeper_trainer.formats.steps import list_steps
from tests.trainer.any_state import leaves

COMMITTED_WITHIN_S = 100.0
WIDTH = 700  # tensors of 2 MB: each takes a while to be hashed and written


class Own:
    """A part of the script's own, which gives out what it works with."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {"seen": [0], "deep": {"names": ["a"]}, "mean": torch.zeros(50_000)}

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


class Training:
    """The same on all ranks."""

    def __init__(self) -> None:
        torch.manual_seed(3)
        layers = [torch.nn.Linear(WIDTH, WIDTH), torch.nn.BatchNorm1d(WIDTH), torch.nn.Linear(WIDTH, 1)]
        self.model = torch.nn.Sequential(*layers)
        self.ema = copy.deepcopy(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.own = Own()

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.model, "ema": self.ema, "optimizer": self.optimizer, "own": self.own}

    def step(self) -> float:
        self.optimizer.zero_grad()
        loss = self.model(torch.randn(4, WIDTH)).square().mean()
        loss.backward()
        self.optimizer.step()
        with torch.no_grad():
            for mean, parameter in zip(self.ema.parameters(), self.model.parameters(), strict=True):
                mean.lerp_(parameter, 0.1)
        self.own.state["seen"].append(len(self.own.state["seen"]))
        self.own.state["mean"] += 1
        return float(loss.detach())

    def fingerprint(self) -> str:
        digest = hashlib.blake2b(digest_size=8)
        for value in leaves([self.state, torch.get_rng_state()]):
            digest.update(value)
        return digest.hexdigest()


def _all_tensors(training: Training) -> list[torch.Tensor]:
    moments = [value for each in training.optimizer.state.values() for value in each.values()]
    return [*training.model.state_dict().values(), *training.ema.parameters(), *moments, training.own.state["mean"]]


@torch.no_grad()
def filled(training: Training, rank: int) -> None:
    for tensor in _all_tensors(training):
        tensor.detach().fill_(rank + 5)


@torch.no_grad()
def swapped(training: Training, rank: int) -> None:
    """The averages take the weights' place for an evaluation, and what was the weights is written to."""
    for mean, parameter in zip(training.ema.parameters(), training.model.parameters(), strict=True):
        mean.data, parameter.data = parameter.data, mean.data
        mean.add_(rank + 1)


@torch.no_grad()
def freed(training: Training, rank: int) -> None:
    """As offloads and FSDP do: the storage goes, and other data takes its memory."""
    for tensor in _all_tensors(training):
        tensor.untyped_storage().resize_(0)
    for parameter in training.model.parameters():
        parameter.data = torch.full((3,), float(rank))
    training.own.state["taken"] = [torch.full((WIDTH, WIDTH), float(rank)) for _ in range(8)]


@torch.no_grad()
def merged(training: Training, rank: int) -> None:
    """As LoRA's adapters are; the optimizer begins anew with another rate."""
    for parameter in training.model.parameters():
        parameter.add_(torch.rand_like(parameter) + rank)
    training.optimizer.state.clear()
    training.optimizer.param_groups[0].update(lr=99.0, weight_decay=float(rank))


def loaded(training: Training, rank: int) -> None:
    """Another state is loaded in place."""
    other = Training()
    filled(other, rank)
    training.model.load_state_dict(other.model.state_dict())
    training.optimizer.load_state_dict(other.optimizer.state_dict())


def in_the_depths(training: Training, rank: int) -> None:
    """What is no tensor, within what the part has given out; random numbers are drawn."""
    training.own.state["seen"][0] = 1000 + rank
    training.own.state["deep"]["names"].append("b")
    training.own.state["more"] = rank
    torch.rand(10 + rank)


def dropped(training: Training, rank: int) -> None:  # noqa: ARG001
    """The script keeps nothing of it."""
    training.model, training.ema = torch.nn.Sequential(), torch.nn.Sequential()
    training.optimizer.param_groups.clear()
    training.optimizer.state.clear()
    training.own.state = {}
    gc.collect()


HOW: dict[str, Callable[[Training, int], None]] = {
    each.__name__: each for each in (filled, swapped, freed, merged, loaded, in_the_depths, dropped)
}
CHANGED_SINCE = 3  # the saves before have found out what the ranks hold alike
STEPS_MAX = 50


def changed(rank: int, directory: Path, *, how: str) -> int:
    """Change the state as soon as a `step_done` that has begun a save returns; end once the step is committed."""
    training = Training()
    manager = CheckpointManager(
        training.state, every=1, run_dir=directory, total_steps=100, storage_test="off", save_within_s=100
    )
    manager.resume()
    while manager.step < STEPS_MAX:
        loss = training.step()
        print(f"[{rank}] done {manager.step + 1} {training.fingerprint()}", flush=True)
        manager.step_done(loss=loss)
        save = manager._saver.last
        if save is None or save.summary.step != manager.step:
            time.sleep(0.05)  # another save is in flight on some rank
            continue
        if manager.step >= CHANGED_SINCE:
            HOW[how](training, rank)
        _until_committed(directory, manager.step)
        if dist.is_initialized():
            dist.barrier()
        if manager.step >= CHANGED_SINCE:
            print(f"[{rank}] changed {manager.step}", flush=True)
            return 0
    return 1


def resumed(rank: int, directory: Path) -> int:
    """Print what a new process gets."""
    training = Training()
    training.step()  # what is loaded replaces all of it
    manager = CheckpointManager(training.state, every=None, run_dir=directory, resume_from="latest", total_steps=100)
    print(f"[{rank}] resumed {manager.resume()} {training.fingerprint()}", flush=True)
    return 0


def _until_committed(directory: Path, step: int) -> None:
    limit_at = time.monotonic() + COMMITTED_WITHIN_S
    while not any(found.step == step for found in list_steps(directory / "checkpoints")):
        assert time.monotonic() < limit_at, f"step {step} is not committed"
        time.sleep(0.02)
