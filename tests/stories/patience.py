"""Trainings that are not over before what a story waits for has come, however fast the machine is."""

import os
import shutil
import signal
from pathlib import Path

from tests.lab import Lab, processes
from tests.training import SMALL, Training

SCRIPT = Path(__file__).with_name("patient.py")


def patient(lab: Lab, name: str, *run_args: str, after: int = 0, **fields) -> Training:
    """Submit a training whose steps are slow from one on and until `hurry`: it is not over before what is waited for.

    However fast the machine is: by the clock of its steps it would be a matter of chance there.
    """
    training = Training(lab, name=name, run_args=run_args, **{"step_seconds": 0.05, **fields})
    training.command = patient_line(training, after=after)
    return training.submit()


def patient_line(training: Training, *, after: int = 0) -> tuple[str, ...]:
    """The command of such a training, put where its user can read it."""
    place(training).mkdir()
    shutil.copyfile(SCRIPT, place(training) / SCRIPT.name)
    for path in (place(training), place(training) / SCRIPT.name):
        shutil.chown(path, training.user)
    training.env["PATIENT_AFTER"] = str(after)
    return (
        str(training.python), str(place(training) / SCRIPT.name), str(place(training) / "hurry"),
        f"--steps={training.steps}", f"--seed={training.seed}", f"--checkpoint-every-steps={training.every}",
        f"--step-seconds-min={training.step_seconds}", *SMALL, *training.script_args,
    )  # fmt: skip


def place(training: Training) -> Path:
    return training.work / f"{training.name}-place"


def hurry(training: Training) -> None:
    """Have it take its steps as quickly as it can from now on."""
    (place(training) / "hurry").touch()


def kill_rank(training: Training) -> None:
    """The one of the newest launch, once it trains: that of the launch before is dead."""
    told = place(training) / "rank-1"
    training.until(lambda: told.exists() and processes.alive(int(told.read_text())), "a rank that trains")
    os.kill(int(told.read_text()), signal.SIGKILL)
