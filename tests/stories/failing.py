"""The reference training, which fails in one of many ways: `python failing.py HOW STEP LAUNCHES RANK [options of it]`.

Copied to where the job's user can read it; imports nothing of the tests.
"""

import faulthandler
import os
import signal
import sys
import time

import torch

from stepkeeper_trainer.examples import train_lm


def fail(how: str) -> None:
    """Fail as real programs do."""
    match how:
        case "out-of-memory":
            raise torch.OutOfMemoryError(
                "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of"
            )
        case "exception":
            raise ValueError("a label lies beyond the vocabulary")
        case "segfault":
            faulthandler.disable()
            os.kill(os.getpid(), signal.SIGSEGV)
        case "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "hang":
            waiting_for_data()
    raise AssertionError(f"unknown: {how}")


def waiting_for_data() -> None:
    """Stand where a broken data loader would."""
    while True:
        time.sleep(1)


def main() -> None:
    """Train, and fail at a step of the first launches of the run."""
    how, step, launches, rank = sys.argv[1], *map(int, sys.argv[2:5])
    del sys.argv[1:5]
    train_step = train_lm.train_step

    def failing_step(training: train_lm.Training, done: int) -> tuple[float, float]:
        loss, norm = train_step(training, done)
        fails = int(os.environ["STEPKEEPER_LAUNCH"]) < launches
        if fails and how == "silent-nan" and done + 1 >= step:
            return float("nan"), norm
        now = fails and done + 1 == step
        if now and how == "nan":
            loss = float("nan")
            if training.place.rank == rank:
                raise FloatingPointError(f"loss is {loss} at step {step}")
        elif now and training.place.rank == rank:
            fail(how)
        return loss, norm

    train_lm.train_step = failing_step
    train_lm.main()


if __name__ == "__main__":
    main()
