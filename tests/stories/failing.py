"""The reference training, which fails in one of many ways: `python failing.py HOW STEP LAUNCHES RANK [options of it]`.

Copied to where the job's user can read it; imports nothing of the tests.
"""

import gc
import os
import signal
import sys

if __name__ == "__main__":
    gc.disable()  # until all is imported, see train_lm
if sys.argv[1] == "poison" and (os.environ["STEPKEEPER_LAUNCH"], os.environ["SLURM_PROCID"]) == ("1", sys.argv[4]):
    os.kill(os.getpid(), signal.SIGSTOP)  # in the launch after the poison: it never gets to its imports

import ctypes
import faulthandler
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch

from stepkeeper_trainer.examples import train_lm
from stepkeeper_trainer.formats import steps

LOADS_S, SLOW_S = 0.2, 1.0  # waiting for data: on every node, and on one that is slow, besides
SAVED_WITHIN_S = 30.0


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
        case "native":
            waiting_below_python()
        case "asleep":
            sleeping_for_hours()
        case "locked":
            waiting_for_a_lock()
        case "computes":
            computing()
    raise AssertionError(f"unknown: {how}")


def waiting_for_data() -> None:
    """Stand where a broken data loader would."""
    while True:
        time.sleep(1)


def waiting_below_python() -> None:
    """Stand in native code, as in a driver; a signal ends each wait, and another one begins."""
    libc = ctypes.CDLL(None)
    while True:
        libc.pause()


def sleeping_for_hours() -> None:
    """Stand in one wait, as a back-off that was multiplied too often."""
    time.sleep(7200)


def waiting_for_a_lock() -> None:
    """Stand where a thread has taken a lock twice."""
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def computing() -> None:
    """Stand in a loop that has no end."""
    while True:
        pass


def poison(training: train_lm.Training, step: int) -> None:
    """Have the data that the step takes first make the loss, and with it the weights, NaN, whenever it is taken."""
    first = (step - 1) * training.options.batch

    def spoil(_model: torch.nn.Module, _given: object, loss: torch.Tensor) -> torch.Tensor:
        return loss * float("nan") if training.sampler.consumed == first else loss

    training.model.register_forward_hook(spoil)


def wait_saved(step: int) -> None:
    """Wait until a step is whole in storage, however slow that is: from where the run goes on is no chance then."""
    checkpoints = Path(os.environ["STEPKEEPER_RUN_DIR"]) / "checkpoints"
    limit = time.monotonic() + SAVED_WITHIN_S
    while not any(entry.step >= step and entry.manifest for entry in steps.list_steps(checkpoints)):
        if time.monotonic() > limit:
            return  # the story tells what followed
        time.sleep(0.05)


Step = Callable[[train_lm.Training, int], tuple[float, float]]


def corrupting(train_step: Step, how: str, step: int, launches: int, rank: int) -> Step:
    """Have one product of matrices come to one wrong bit, in the second computation after a step."""
    right, computations = torch.nn.functional.linear, 0

    def wrong(*operands: torch.Tensor) -> torch.Tensor:
        product = right(*operands)
        product.data.view(-1).view(torch.int32)[0] ^= 1 << 12
        return product

    def count(*_: object) -> None:
        nonlocal computations
        computations += 1
        torch.nn.functional.linear = wrong if computations == 2 else right

    def corrupted(training: train_lm.Training, done: int) -> tuple[float, float]:
        if done == step and int(os.environ["STEPKEEPER_LAUNCH"]) < launches:
            wait_saved(done)
            if training.place.rank == rank:
                training.model.register_forward_pre_hook(count)
        return train_step(training, done)

    return corrupted if how == "corrupt" else train_step


def is_slow() -> bool:
    """Whether this node has been named as one whose data comes late."""
    try:
        return Path(os.environ["STEPKEEPER_RUN_DIR"] + ".slow").read_text() == os.environ["SLURMD_NODENAME"]
    except FileNotFoundError:
        return False


def main() -> None:
    """Train, and fail at a step of the first launches of the run."""
    how, step, launches, rank = sys.argv[1], *map(int, sys.argv[2:5])
    del sys.argv[1:5]
    train_step = corrupting(train_lm.train_step, how, step, launches, rank)
    poisoned = []

    def failing_step(training: train_lm.Training, done: int) -> tuple[float, float]:
        if how == "poison" and not poisoned:
            poison(training, step)
            poisoned.append(training)
        if how == "spike":
            time.sleep(LOADS_S + (SLOW_S if is_slow() else 0.0))
        fails = int(os.environ["STEPKEEPER_LAUNCH"]) < launches
        every = training.options.checkpoint_every_steps
        just_saved = how == "silent-nan" and done >= step and done % every == 0  # what is no number, too
        if fails and done >= every and (done + 1 == step or just_saved):
            wait_saved(done - done % every)
        loss, norm = train_step(training, done)
        if fails and how == "silent-nan" and done + 1 >= step:
            return float("nan"), norm
        if fails and how == "spike" and done + 1 >= step:
            return 10 * loss, norm
        now = fails and done + 1 == step
        if now and how == "nan":
            loss = float("nan")
            if training.place.rank == rank:
                raise FloatingPointError(f"loss is {loss} at step {step}")
        elif now and training.place.rank == rank and how not in ("poison", "corrupt"):
            fail(how)
        return loss, norm

    train_lm.train_step = failing_step
    train_lm.main()


if __name__ == "__main__":
    main()
