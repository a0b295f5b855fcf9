"""The reference training, resting after each step until a file is there: `python unhurried.py FILE [options of it]`.

A step works for some time of a processor besides, so that a slow node takes longer by as much on every machine.
Copied to where the job's user can read it; imports nothing of the tests.  Beside the file each rank tells its pid.
"""

import os
import sys
import time
from pathlib import Path

from stepkeeper_trainer.examples import train_lm

RESTS_S, WORKS_S = 3.5, 0.04
hurry = Path(sys.argv.pop(1))
train_step = train_lm.train_step


def unhurried_step(training: train_lm.Training, done: int) -> tuple[float, float]:
    """Train a step, and work, then rest: that is no work, and no loading of data."""
    loss, norm = train_step(training, done)
    worked = time.thread_time() + WORKS_S
    while time.thread_time() < worked and not hurry.exists():
        pass
    told = hurry.with_name(f"rank-{training.place.rank}")
    new = told.with_suffix(f".{os.getpid()}")
    new.write_text(str(os.getpid()))
    new.replace(told)  # who reads it sees all of it
    rested_until = time.monotonic() + RESTS_S
    while time.monotonic() < rested_until and not hurry.exists():
        time.sleep(0.1)
    return loss, norm


train_lm.train_step = unhurried_step
train_lm.main()
