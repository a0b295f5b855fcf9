"""The reference training, resting after each step until a file is there: `python unhurried.py FILE [options of it]`.

Copied to where the job's user can read it; imports nothing of the tests.  Beside the file each rank tells its pid.
"""

import os
import sys
import time
from pathlib import Path

from stepkeeper_trainer.examples import train_lm

RESTS_S = 3.5
hurry = Path(sys.argv.pop(1))
train_step = train_lm.train_step


def unhurried_step(training: train_lm.Training, done: int) -> tuple[float, float]:
    """Train a step, then rest: that is no work, and no loading of data."""
    loss, norm = train_step(training, done)
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
