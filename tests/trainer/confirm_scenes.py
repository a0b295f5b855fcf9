"""Ranks of which one computes wrongly, or whose computations are never the same: scenes for `test_confirmation`."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from stepkeeper_trainer import CheckpointManager
from stepkeeper_trainer.observe.confirmation import FIRST_TIMES, TIMES

STEPS = 9
BIT = 1 << 12  # of a number's 23 behind the point: a two-thousandth of it, which no rounding hides
EVERY = SAVES_EVERY = 3
WRONG_AT = 6  # steps done at the third check


class Model(nn.Module):
    """What a computation could leave traces in: running statistics, dropout, a counter of batches."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.norm: nn.Module = nn.BatchNorm1d(16)
        self.dropout, self.last = nn.Dropout(0.5), nn.Linear(16, 4)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.last(self.dropout(torch.relu(self.norm(self.first(batch)))))


def _wrapped(model: Model, wrap: str) -> nn.Module:
    if wrap == "ddp":
        return DistributedDataParallel(model)
    if wrap == "plain":
        return model
    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    policy = mixed if wrap == "mixed" else MixedPrecisionPolicy()  # with it, gradients are accumulated somewhere else
    fully_shard(model.first, mp_policy=policy)
    return fully_shard(model, mp_policy=policy)


def train(
    rank: int,
    directory: str,
    *,
    wrap: str = "ddp",
    every: int | None = EVERY,
    spoil: Callable[[Model, int], Callable[[], None]] = lambda _model, _rank: lambda: None,
    accumulate: int = 2,
    promised: bool = True,
) -> int:
    """Train; what is left at the end goes to a file of the rank.  `spoil` returns what each computation calls first."""
    logging.basicConfig(level=logging.INFO)
    torch.use_deterministic_algorithms(promised)
    torch.manual_seed(rank)
    model = Model()
    if wrap == "mixed":
        model.norm = nn.LayerNorm(16)  # batch norm on a CPU takes one precision only
    for value in model.parameters():  # alike on all ranks, as of a seed; their data and dropout are not
        with torch.no_grad():
            value.copy_(torch.linspace(-0.5, 0.5, value.numel()).view(value.shape))
    trained = _wrapped(model, wrap)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size)}
    manager = CheckpointManager(
        {"model": trained, "optimizer": optimizer},
        run_dir=directory,
        every=None,
        total_steps=STEPS,
        retention="all",
        confirm_every=every,
        storage_test="off",
    )
    manager.resume()
    computes = spoil(model, rank)
    numbers = torch.Generator().manual_seed(7 + rank)
    for _ in manager.steps():
        batches = [torch.randn(6, 8, generator=numbers) for _ in range(accumulate)]

        def compute(number: int) -> torch.Tensor:
            computes()
            if isinstance(trained, FSDPModule):
                trained.set_requires_gradient_sync(number == accumulate - 1)
            if isinstance(trained, DistributedDataParallel):
                trained.require_backward_grad_sync = number == accumulate - 1
            loss = trained(batches[number]).square().mean()  # noqa: B023
            (loss / accumulate).backward()
            return loss.detach()

        loss = manager.confirm(lambda: compute(0))
        for number in range(1, accumulate):
            loss = loss + compute(number)
        optimizer.step()
        optimizer.zero_grad()
        done = manager.step_done(loss=float(loss))
        if manager.step % SAVES_EVERY == 0 and not done:
            manager.save()
            manager.wait_saved()
    left = [value.full_tensor() if hasattr(value, "full_tensor") else value for value in model.state_dict().values()]
    torch.save([*left, torch.get_rng_state()], Path(directory) / f"left.{rank}")
    return manager.finish()


def _counted(wrong: Callable[[], Callable[[], None]], *, at: int) -> Callable[[], None]:
    """Have one computation of a launch done wrongly: `wrong` begins it, and what that returns ends it."""
    calls, end = 0, None

    def call() -> None:
        nonlocal calls, end
        calls += 1
        if end is not None:
            end()
            end = None
        if calls == at:
            end = wrong()

    return call


_SECOND = FIRST_TIMES + TIMES + 2 * WRONG_AT + 2
"""The second computation of the third check: behind two others, and two micro-batches in each step."""


def flips_a_weight(
    rank: int, directory: str, *, guilty: int, watcher: str, wrap: str = "ddp", promised: bool = True
) -> int:
    """One bit of a parameter is another one in one computation of a rank."""

    def spoil(model: Model, own: int) -> Callable[[], None]:
        def flip() -> None:
            model.last.bias.data.view(torch.int32)[0] ^= BIT

        def wrong() -> Callable[[], None]:
            flip()
            return flip

        return _counted(wrong, at=_SECOND) if own == guilty else lambda: None

    os.environ["STEPKEEPER_SOCKET"] = watcher
    return train(rank, directory, wrap=wrap, spoil=spoil, promised=promised)


def multiplies_wrongly(rank: int, directory: str, *, guilty: int, watcher: str, wrap: str = "ddp") -> int:
    """One product of matrices in a forward pass has one wrong bit in one of its elements."""
    right = nn.functional.linear

    def linear(*operands: torch.Tensor) -> torch.Tensor:
        product = right(*operands)
        with torch.no_grad():
            product.view(-1).view(torch.int32)[3] ^= BIT
        return product

    def wrong() -> Callable[[], None]:
        nn.functional.linear = linear
        return lambda: setattr(nn.functional, "linear", right)

    def spoil(_model: Model, own: int) -> Callable[[], None]:
        return _counted(wrong, at=_SECOND) if own == guilty else lambda: None

    os.environ["STEPKEEPER_SOCKET"] = watcher
    return train(rank, directory, wrap=wrap, spoil=spoil)


def never_the_same(rank: int, directory: str, *, ranks_that: list[int], since: int = 0) -> int:
    """Each computation of some ranks comes to other bits, from some call on."""

    def spoil(model: Model, own: int) -> Callable[[], None]:
        calls = 0

        def count(gradient: torch.Tensor) -> torch.Tensor:
            return gradient * (1 + calls * 2.0**-20) if calls > since else gradient

        def call() -> None:
            nonlocal calls
            calls += 1

        if own in ranks_that:
            model.first.weight.register_hook(count)
        return call

    return train(rank, directory, spoil=spoil)


def changes_weights(rank: int, directory: str) -> int:
    """What `confirm` is given does an optimizer's step."""

    def spoil(model: Model, _own: int) -> Callable[[], None]:
        def change() -> None:
            with torch.no_grad():
                model.last.bias.add_(1)

        return change

    return train(rank, directory, wrap="plain", spoil=spoil)
