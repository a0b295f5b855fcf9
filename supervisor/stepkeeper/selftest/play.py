"""The self-test: two jobs of the same training, one left alone, one killed and requeued half-way."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from stepkeeper.core.exits import ExitCode
from stepkeeper.errors import StepkeeperError
from stepkeeper.selftest import jobs, proof
from stepkeeper.slurm.calling import call
from stepkeeper.slurm.client import SlurmError
from stepkeeper.submitting import sbatch
from stepkeeper.submitting.script import Wanted, program, render

STEPS = 120
LIMIT = "00:15:00"  # less than what makes SIGUSR1 a notice of the time limit: the job then requeues itself
STEP_S = 0.25  # of the tested run: slow enough to be met half-way
PYTHON_WITHIN_S = 120.0  # a cold import of torch from a shared file system
CALL_WITHIN_S = 10.0
LOOK_EVERY_S = 1.0
TRAINING = ("layers=2", "width=64", "heads=2", "context=32", "micro-batch=1", "checkpoint-every-steps=20")
METRICS = "metrics.csv"


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """What the jobs ask for."""

    partition: str | None
    account: str | None
    nodes: int
    gpus_per_node: str | None
    sbatch: tuple[str, ...]
    setup: tuple[str, ...]
    python: str  # with torch and the trainer library

    @property
    def ranks(self) -> int:
        """Of the whole job: one a GPU, else one a node."""
        gpus = re.search(r"(\d+)$", self.gpus_per_node or "")
        return self.nodes * (int(gpus.group(1)) if gpus else 1)


class Play:
    """One self-test.  Every wait ends in time, and `stop` leaves no job behind."""

    def __init__(
        self, shape: Shape, directory: Path, *, client: jobs.Slurm, within_s: float, say: Callable[[str], None]
    ) -> None:
        """Describe it; nothing starts yet."""
        self.shape, self.directory, self._client, self._say = shape, directory, client, say
        self._give_up_at = time.monotonic() + within_s
        self._within_s = within_s
        self.jobs: dict[str, int] = {}

    def play(self) -> proof.Proof:
        """Submit, disturb, wait, compare.

        Raises:
            StepkeeperError: what did not happen in time, and where to look.
            SlurmError: Slurm refuses something that a run needs.
        """
        check_python(self.shape.python)
        self._submit("reference", step_s=0.0)
        self._submit("tested", step_s=STEP_S)
        self._until(lambda: self._step() >= STEPS // 4, f"step {STEPS // 4} of the tested run")
        self._kill_ranks()
        self._until(lambda: self._launches() > 1 and self._step() >= STEPS // 2, "the relaunch")
        self._say(f"relaunched in the same allocation; now at step {self._step()}")
        self._call("scancel", "--batch", "--signal=USR1", str(self.jobs["tested"]))
        self._say("told that its time limit is near: it must save and requeue itself")
        self._until(lambda: self._attempts() > 1, "the next attempt (Slurm may make a requeued job wait 2 minutes)")
        self._say(f"requeued, and resumed; now at step {self._step()}")
        self._until(lambda: all(map(self._is_over, self.jobs)), "the end of both runs")
        return proof.compare(self._rows("reference"), self._rows("tested"))

    def stop(self) -> None:
        """Cancel what is left of the jobs."""
        for job in self.jobs.values():
            try:
                jobs.stop(self._client, job)
            except SlurmError as error:
                self._say(f"job {job} may still be there: {error}")

    def _submit(self, name: str, *, step_s: float) -> None:
        ranks = self.shape.ranks
        run_dir = self.directory / name
        script = render(
            Wanted(
                command=(
                    *(self.shape.python, "-m", "stepkeeper_trainer.examples.train_lm"),
                    *(f"--{each}" for each in TRAINING),
                    f"--steps={STEPS}",
                    f"--batch={ranks * max(1, 8 // ranks)}",
                    f"--step-seconds-min={step_s}",
                ),
                program=program(),
                options=("--run-dir", str(run_dir)),
                nodes=str(self.shape.nodes),
                gpus_per_node=self.shape.gpus_per_node,
                time=LIMIT,
                partition=self.shape.partition,
                account=self.shape.account,
                job_name=f"stepkeeper-selftest-{name}",
                output=str(self.directory / f"{name}.log"),
                sbatch=self.shape.sbatch,
                setup=self.shape.setup,
            )
        )
        clean = {key: value for key, value in os.environ.items() if not key.startswith("STEPKEEPER_")}
        self.jobs[name] = sbatch.submit(script, environment=clean)
        self._say(f"job {self.jobs[name]}: the {name} run")

    def _kill_ranks(self) -> None:
        job = self.jobs["tested"]
        steps = self._call("squeue", "--steps", "--noheader", f"--jobs={job}", "--format=%i %j").splitlines()
        training = [
            number
            for number, _, name in (line.strip().partition(" ") for line in steps)
            if name.strip() != "stepkeeper-watcher" and re.search(r"\.\d+$", number)
        ]
        if not training:
            raise StepkeeperError(f"job {job}: squeue shows no step of the training: {steps}", ExitCode.SITE_UNFIT)
        self._call("scancel", "--signal=KILL", training[-1])
        self._say(f"at step {self._step()}: killed all ranks (kill -9): it must go on in the same allocation")

    def _until(self, condition: Callable[[], bool], what: str) -> None:
        while not condition():
            for name in tuple(self.jobs):
                # looked at once more: it may have gone on and ended while Slurm was asked
                if self._step(name) < STEPS and self._is_over(name) and self._step(name) < STEPS:
                    raise StepkeeperError(
                        f"job {self.jobs[name]} (the {name} run) ended at step {self._step(name)} of {STEPS}, before "
                        f"{what}; see {self.directory / f'{name}.log'}",
                        ExitCode.SITE_UNFIT,
                    )
            if time.monotonic() > self._give_up_at:
                raise StepkeeperError(
                    f"{what} did not come within {self._within_s:g} s of the start; see {self.directory}, and "
                    "`squeue --me` for what the jobs wait for",
                    ExitCode.SITE_UNFIT,
                )
            time.sleep(LOOK_EVERY_S)

    def _is_over(self, name: str) -> bool:
        """Tell whether a run's job has ended, and no other one was submitted in its place."""
        is_over, self.jobs[name] = jobs.over(self._client, self.jobs[name])
        return is_over

    def _call(self, *argv: str) -> str:
        return call(argv, CALL_WITHIN_S, what=" ".join(argv))

    def _rows(self, name: str) -> list[proof.Row]:
        return proof.read(self.directory / name / METRICS)

    def _step(self, name: str = "tested") -> int:
        return max((row.step for row in self._rows(name)), default=0)

    def _launches(self) -> int:
        return len({(row.attempt, row.launch) for row in self._rows("tested")})

    def _attempts(self) -> int:
        return len({row.attempt for row in self._rows("tested")})


def check_python(python: str) -> None:
    """Refuse an interpreter that cannot train, before a job waits in the queue for nothing.

    Raises:
        StepkeeperError: what is missing in it.
    """
    if shutil.which(python) is None:
        raise StepkeeperError(f"--python {python}: no such program", ExitCode.USAGE)
    try:
        done = subprocess.run(
            [python, "-c", "import torch, stepkeeper_trainer"],
            capture_output=True,
            text=True,
            timeout=PYTHON_WITHIN_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise StepkeeperError(f"--python {python}: {error}", ExitCode.USAGE) from error
    if done.returncode:
        said = (done.stderr.strip().splitlines() or ["?"])[-1]
        raise StepkeeperError(
            f"--python {python}: cannot train: {said}; name an interpreter with torch in which `pip install "
            "stepkeeper` was done",
            ExitCode.USAGE,
        )
