"""What the training scripts share: options, a small model, data by the number of the step, and a log of losses.

Nothing here knows Stepkeeper: the scripts are such as people run.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

FEATURES = 16


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--losses", required=True)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--every", type=int, default=2)
    parser.add_argument("--resume", default="")
    parser.add_argument("--variant", default="")
    return parser.parse_args()


def rank() -> int:
    return int(os.environ["RANK"])


def seed() -> None:
    torch.set_num_threads(1)
    random.seed(7)
    np.random.seed(7)  # noqa: NPY002 - as scripts do
    torch.manual_seed(7)


def begin() -> None:
    """Join the process group, for scripts that do it themselves."""
    seed()
    dist.init_process_group("gloo")


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(FEATURES, 32), nn.Tanh(), nn.Linear(32, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the data of one step, the same for each run."""
    generator = torch.Generator().manual_seed(1000 * step + rank())
    x = torch.randn(8, FEATURES, generator=generator)
    return x, x.sum(1, keepdim=True).sin()


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    x, y = batch(step)
    return nn.functional.mse_loss(model(x), y)


def log(path: str, step: int, loss: float) -> None:
    """Append the loss of this rank."""
    time.sleep(float(os.environ.get("TEST_STEP_S", "0")))
    with open(f"{path}.{rank()}", "a", encoding="utf-8") as file:
        file.write(f"{step} {loss!r}\n")


def tell() -> None:
    """Have libraries say what they do."""
    logging.basicConfig(level=logging.INFO)


def note(path: str, **values: object) -> None:
    """Write down what this rank has at the end."""
    with open(f"{path}.end.{rank()}", "w", encoding="utf-8") as file:
        json.dump(values, file)


def compiling(model: torch.nn.Module, options: argparse.Namespace) -> torch.nn.Module:
    """Have the first step compile the model for two seconds; a file shows that it has begun."""

    def compile_slowly(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> Callable:
        Path(f"{options.losses}.compiling").touch()
        time.sleep(2)
        return graph.forward

    model.compile(backend=compile_slowly)
    return model
