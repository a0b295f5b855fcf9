"""The reference training, which stands far from the end of a step: `python far.py PLACE STEP [options of it]`.

It stands there in the first attempt, until it is killed.  Copied to where the job's user can read it; imports nothing
of the tests.
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
    """Work in Python without a pause."""
    while True:
        sum(number * number for number in range(100_000))


PLACES = {"evaluation": evaluate, "loader": load, "compilation": compile_, "warm-up": compile_}


def far_step(training: train_lm.Training, done: int) -> tuple[float, float]:
    """Stand somewhere before the step that is not to be done, or train it."""
    if done == step and os.environ["STEPKEEPER_ATTEMPT"] == "0":
        Path(__file__).with_name(f"stands-{training.place.rank}").touch()
        PLACES[place](training)
    return train_step(training, done)


train_lm.train_step = far_step
train_lm.main()
