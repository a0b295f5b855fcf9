"""The reference training in slow steps, until a file is there: `python patient.py FILE [options of it]`.

Copied to where the job's user can read it; imports nothing of the tests.  Beside the file each rank tells its pid.
How slow, where the usual is not slow enough: `PATIENT_STEP_S`.
"""

import os
import sys
import time
from pathlib import Path

from stepkeeper_trainer.examples import train_lm

SLOW_S = float(os.environ.get("PATIENT_STEP_S", "1.5"))
AFTER = int(os.environ.get("PATIENT_AFTER", "0"))
hurry = Path(sys.argv.pop(1))
train_step = train_lm.train_step


def slow_step(training: train_lm.Training, done: int) -> tuple[float, float]:
    """Train a step, after a while."""
    told = hurry.with_name(f"rank-{training.place.rank}")
    new = told.with_suffix(f".{os.getpid()}")
    new.write_text(str(os.getpid()))
    new.replace(told)  # who reads it sees all of it
    if done >= AFTER and not hurry.exists():
        time.sleep(SLOW_S)
    return train_step(training, done)


train_lm.train_step = slow_step
train_lm.main()
