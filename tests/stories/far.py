"""The reference training, which stands far from the end of a step: `python far.py PLACE STEP [options of it]`.

It stands there in the first attempt, until it is killed; at `resumed` in the second one too, before its first step.
Copied to where the job's user can read it; imports nothing of the tests.
"""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from stepkeeper_trainer.examples import train_lm

place, step = sys.argv.pop(1), int(sys.argv.pop(1))
train_step = train_lm.train_step


def evaluate(training: train_lm.Training) -> None:
    """Evaluate for ever: all ranks gather the shards of the weights, and draw random numbers."""
    training.model.eval()
    while True:
        with torch.no_grad():
            training.model(*training.corpus.batch([1, 2], training.device))
        torch.rand(10)
        time.sleep(0.05)


def load(training: train_lm.Training) -> None:
    """Wait for data on one rank, and for that rank in a collective on the others."""
    while training.place.rank == 1:
        time.sleep(1)
    dist.barrier()


def compile_(_: train_lm.Training) -> None:
    """Compile one module after the other, as a first step does: no line of Python ends for long."""
    for width in range(8, 1 << 20):
        layers = [layer for _ in range(40) for layer in (torch.nn.Linear(width, width), torch.nn.Tanh())]
        torch.compile(torch.nn.Sequential(*layers), backend="aot_eager")(torch.ones(1, width)).sum().backward()
        torch.compiler.reset()


def reduce(_: train_lm.Training) -> None:
    """Be in a collective, which takes seconds."""
    values = torch.zeros(64 * 1024 * 1024)
    while True:
        dist.all_reduce(values)


PLACES = {
    "evaluation": evaluate,
    "loader": load,
    "compilation": compile_,
    "collective": reduce,
    "warm-up": compile_,
    "resumed": load,
}
attempt = os.environ["STEPKEEPER_ATTEMPT"]
stands = attempt in ("0", "1") if place == "resumed" else attempt == "0"


def far_step(training: train_lm.Training, done: int) -> tuple[float, float]:
    """Stand somewhere before the step that is not to be done, or train it."""
    if done == step and stands:
        Path(__file__).with_name(f"stands-{attempt}-{training.place.rank}").touch()
        PLACES[place](training)
    return train_step(training, done)


train_lm.train_step = far_step
train_lm.main()
