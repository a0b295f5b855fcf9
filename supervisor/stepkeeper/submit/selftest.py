"""The self-test: two jobs of the same training, one left alone, one killed and requeued half-way."""

from __future__ import annotations

import csv
import itertools
import math
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

import msgspec

from stepkeeper.core.events import JobFacts, JobState
from stepkeeper.core.exits import ExitCode
from stepkeeper.errors import StepkeeperError, UsageError
from stepkeeper.slurm.client import SlurmError
from stepkeeper.slurm.jobs import call
from stepkeeper.submit import sbatch
from stepkeeper.submit.sbatch import Wanted, program, render

# The jobs of a self-test, also where the site lets none be requeued and another one is submitted in its place.

WITHIN_S = 10.0
_FOLLOWS = re.compile(r"(?P<job>\d+)\|.*\bstepkeeper:after=(?P<before>\d+)\.")  # what its comment says


class Slurm(Protocol):
    """What is asked of a `SlurmCommands` here."""

    def job(self, job: str) -> JobFacts:
        """Return the facts of a job."""
        ...

    def cancel(self, job: str) -> None:
        """Cancel a job of our own."""
        ...


def listed() -> str:
    """Return this user's jobs and their comments.  Raises SlurmError."""
    argv = ("squeue", "--noheader", f"--user={os.getuid()}", "--states=all", "--format=%A|%k")
    return call(argv, WITHIN_S, what="squeue")


def chain(listing: str, job: int) -> tuple[int, ...]:
    r"""Return a job and those that were submitted in its place, one after the other.

    >>> chain("9|stepkeeper:after=7.0\n8|(null)\n7|(null)\n12|mine stepkeeper:after=9.1", 7)
    (7, 9, 12)
    """
    followed = {int(match["before"]): int(match["job"]) for match in map(_FOLLOWS.match, listing.splitlines()) if match}
    found = [job]
    while (following := followed.get(found[-1])) is not None and following not in found:
        found.append(following)
    return tuple(found)


def state(slurm: Slurm, job: int) -> JobState:
    """Return the state of a job; one that Slurm has forgotten has ended.  Raises SlurmError."""
    try:
        return slurm.job(str(job)).state
    except SlurmError as error:
        if not error.forgotten:
            raise
        return JobState.ENDED


def newest(job: int) -> int:
    """Return the job that goes on in place of another one: itself, if none was submitted.  Raises SlurmError."""
    return chain(listed(), job)[-1]


def over(slurm: Slurm, job: int) -> tuple[bool, int]:
    """Tell whether a job and all in its place have ended, and which is the newest of them.

    A Slurm that does not answer says nothing of an end: it is asked again.

    Raises:
        SlurmError: Slurm refuses to answer.
    """
    try:
        if state(slurm, job) is not JobState.ENDED:
            return False, job
        last = newest(job)
        return last == job or state(slurm, last) is JobState.ENDED, last
    except SlurmError as error:
        if error.unreachable:
            return False, job
        raise


def stop(slurm: Slurm, job: int) -> None:
    """Cancel what is left of a job and of those in its place, the last one first: nobody follows it.

    Raises:
        SlurmError: Slurm does not answer, or refuses.
    """
    for each in reversed(chain(listed(), job)):
        if state(slurm, each) is not JobState.ENDED:
            slurm.cancel(str(each))


# What two runs' records prove: nothing was lost, and what each interruption cost.  Pure but for reading them.

ROUNDING = 1e-4  # relative: sums of a GPU are not always made in the same order


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One line of metrics.csv."""

    step: int
    loss: str
    at: float
    attempt: int
    launch: int


class Interruption(msgspec.Struct, frozen=True, kw_only=True):
    """From the last step before it to the first one after it."""

    requeued: bool  # else relaunched in the same allocation
    after_step: int
    seconds: float  # from the last old step to the first new one
    redone: int  # steps that were done twice


class Proof(msgspec.Struct, frozen=True, kw_only=True):
    """Two runs compared."""

    steps: int
    equal: int  # losses that are the same to the last bit
    largest_difference: float  # relative, of the others
    missing: int  # steps that only one of the runs has
    interruptions: tuple[Interruption, ...]

    def holds(self, *, exactly: bool) -> bool:
        """Whether nothing was lost: all losses are the same, to the last bit or within rounding."""
        same = self.equal == self.steps or (not exactly and self.largest_difference <= ROUNDING)
        return same and self.missing == 0 and self.steps > 0


def read_run(metrics: Path) -> list[Row]:
    """Return the rows in the order in which they were written; none where the file is not there yet."""
    try:
        text = metrics.read_text(errors="replace")  # of one instant: rows may follow a header that was not there yet
    except FileNotFoundError:
        return []
    return list(_rows(csv.DictReader(text.splitlines())))


def _rows(reader: csv.DictReader[str]) -> Iterator[Row]:
    for line in reader:
        try:
            yield Row(
                step=int(line["step"]),
                loss=line["loss"],
                at=float(line["time"]),
                attempt=int(line["attempt"]),
                launch=int(line["launch"]),
            )
        except (KeyError, TypeError, ValueError):
            continue  # the last line is being written


def compare(reference: list[Row], tested: list[Row]) -> Proof:
    """Compare the losses of two runs; a later row of a step supersedes the earlier one."""
    expected = {row.step: row.loss for row in reference}
    found = {row.step: row.loss for row in tested}
    both = expected.keys() & found.keys()
    differences = [_difference(expected[step], found[step]) for step in both]
    return Proof(
        steps=len(both),
        equal=sum(expected[step] == found[step] for step in both),
        largest_difference=max(differences, default=0.0),
        missing=len(expected.keys() ^ found.keys()),
        interruptions=tuple(interruptions(tested)),
    )


def _difference(one: str, other: str) -> float:
    if one == other:
        return 0.0
    a, b = float(one or "nan"), float(other or "nan")
    difference = abs(a - b) / max(abs(a), abs(b), 1e-30)
    return difference if math.isfinite(difference) else math.inf


def interruptions(rows: list[Row]) -> Iterator[Interruption]:
    """Return where one launch ended and the next one went on."""
    launches = [list(group) for _, group in itertools.groupby(rows, lambda row: (row.attempt, row.launch))]
    for before, after in itertools.pairwise(launches):
        furthest = max(row.step for row in before)
        redone = sum(row.step <= furthest for row in after)
        new = next((row for row in after if row.step > furthest), None)
        if new is not None:
            yield Interruption(
                requeued=after[0].attempt != before[0].attempt,
                after_step=furthest,
                seconds=new.at - before[-1].at,
                redone=redone,
            )


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
        self, shape: Shape, directory: Path, *, client: Slurm, within_s: float, say: Callable[[str], None]
    ) -> None:
        """Describe it; nothing starts yet."""
        self.shape, self.directory, self._client, self._say = shape, directory, client, say
        self._give_up_at = time.monotonic() + within_s
        self._within_s = within_s
        self.jobs: dict[str, int] = {}

    def play(self) -> Proof:
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
        self._say("it gets the notice of its time limit: it must save and requeue itself")
        self._until(lambda: self._attempts() > 1, "the next attempt (Slurm may make a requeued job wait 2 minutes)")
        self._say(f"requeued, and resumed; now at step {self._step()}")
        self._until(lambda: all(map(self._is_over, self.jobs)), "the end of both runs")
        return compare(self._rows("reference"), self._rows("tested"))

    def stop(self) -> None:
        """Cancel what is left of the jobs."""
        for job in self.jobs.values():
            try:
                stop(self._client, job)
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
        self._say(f"at step {self._step()}: killed all ranks (kill -9): it must continue in the same allocation")

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
        is_over, self.jobs[name] = over(self._client, self.jobs[name])
        return is_over

    def _call(self, *argv: str) -> str:
        return call(argv, CALL_WITHIN_S, what=" ".join(argv))

    def _rows(self, name: str) -> list[Row]:
        return read_run(self.directory / name / METRICS)

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
        raise UsageError(f"--python {python}: no such program")
    try:
        done = subprocess.run(
            [python, "-c", "import torch, stepkeeper_trainer"],
            capture_output=True,
            text=True,
            timeout=PYTHON_WITHIN_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UsageError(f"--python {python}: {error}") from error
    if done.returncode:
        said = (done.stderr.strip().splitlines() or ["?"])[-1]
        raise UsageError(
            f"--python {python}: cannot train: {said}; name an interpreter with torch in which `pip install "
            "stepkeeper` was done"
        )
