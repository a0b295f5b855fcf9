"""Allocations of `salloc` and bare `srun`: no batch script, so nothing that Slurm could start again."""

import json
import os
import re
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import pytest

from stepkeeper.core import events as on
from stepkeeper.core.exits import ExitCode
from stepkeeper.logtext import is_own
from tests.lab import Lab
from tests.stories import acts
from tests.stories.test_campaign import release_urgent_jobs
from tests.training import SMALL, Training, assert_complete, plain_script

pytestmark = pytest.mark.slurm
ENDS_S = 240.0
SHAPE = ("--nodes=2", "--ntasks-per-node=1", "--gres=gpu:1", "--mem=2000", "--cpus-per-task=1")


@dataclass
class ByHand(Training):
    """A training that a person starts: at the end of a line of `salloc` or `srun`."""

    def line(self, *before: str) -> list[str]:
        """`stepkeeper run -- [BEFORE] python -m ...train_lm ...`."""
        script = (
            str(self.python), "-m", "stepkeeper_trainer.examples.train_lm", f"--steps={self.steps}",
            f"--seed={self.seed}", f"--checkpoint-every-steps={self.every}",
            f"--step-seconds-min={self.step_seconds}", *SMALL,
        )  # fmt: skip
        return [str(self.stepkeeper), "run", *self.run_args, "--", *before, *script]

    @contextmanager
    def started(self, *argv: str) -> Iterator["subprocess.Popen[bytes]"]:
        """Run a line in the user's shell, and see to it that nothing of it is left."""
        known = len(self.events(on.AttemptStarted)) if self.run_dir.exists() else 0
        with self.log.open("ab") as log:
            process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.work,
                env=self.lab.environment(self.user, {"STEPKEEPER_RUN_DIR": str(self.run_dir)}),
                start_new_session=True,  # as a terminal's: the story sends its signals
                **self.lab.identity(self.user),
            )
            try:
                self.until(
                    lambda: self._begins(known) or process.poll() is not None, "the attempt of a line typed by hand"
                )
                assert self._begins(known), self.output()
                self.job_id = self.events(on.AttemptStarted)[-1].event.job_id
                yield process
            finally:
                if process.poll() is None:
                    self.lab.run("scancel", str(self.job_id), check=False)
                    process.terminate()
                process.wait(ENDS_S)

    def _begins(self, known: int) -> bool:
        return (self.run_dir / "journal.jsonl").exists() and len(self.events(on.AttemptStarted)) > known


def said(training: Training, event: str) -> list[tuple[int, str]]:
    """Lines with that name in the job's log, each with its attempt: that of the `attempt_started` before it."""
    text, _, _ = training.output().rpartition("\n")  # whole lines only: another one may be under way
    found, attempt = [], -1
    for line in filter(is_own, text.splitlines()):
        name, _, rest = line.partition("] ")[2].removeprefix("WARNING ").partition(":")
        if name == "attempt_started":
            where = re.search(r"ranks_print_to=.*?/attempt-(\d+)/launch", rest)
            assert where is not None, line
            attempt = int(where[1])
        if name == event:
            found.append((attempt, rest))
    return found


@pytest.mark.campaign
def test_in_salloc_a_failure_is_mended_a_notice_saves_and_the_next_one_goes_on(lab: Lab, reference: Training) -> None:
    """Told at once that nothing will be requeued; then the user's own srun line in a second allocation."""
    training = ByHand(lab, name="salloc", user="games", step_seconds=0.35)
    with training.started("salloc", *SHAPE, *training.line()) as shell:
        training.wait_step(5)
        assert len(said(training, "no_batch_script")) == 1, training.output()
        acts.kill_rank(training)
        training.wait_event(on.CheckpointChosen, count=2)
        training.wait_step(max(training.step() + 3, training.every + 1))  # the notice may come with the very next step
        lab.preempt(training.job_id)
        assert shell.wait(ENDS_S) == ExitCode.NO_BATCH_SCRIPT, training.story()
    assert len(training.launches()) == 2, training.story()
    saved = [record.event.step for record in training.events(on.CheckpointCommitted) if record.event.emergency]
    assert saved, training.story()
    release_urgent_jobs(lab)

    with training.started("salloc", *SHAPE, *training.line("srun", "--ntasks=2")) as shell:
        assert shell.wait(ENDS_S) == ExitCode.FINISHED, training.story()

    assert training.events(on.CheckpointChosen)[-1].event.step == max(saved) > training.every, training.story()
    assert_complete(training, reference)


@pytest.mark.campaign
def test_control_c_in_salloc_saves_and_the_same_allocation_goes_on(lab: Lab, reference: Training) -> None:
    """The person stops it, types the line again, kills the supervisor the hard way, and types it once more."""
    training = ByHand(lab, name="by-hand", step_seconds=0.2)
    again = " ".join(training.line())
    script = f"{again}; echo first $?; {again}; echo second $?; {again}; echo third $?"
    with training.started("salloc", *SHAPE, "bash", "-c", script) as shell:
        training.wait_step(8)
        os.kill(_supervisor(training), signal.SIGINT)
        training.wait_attempt(1)
        training.wait_step(14)
        os.kill(_supervisor(training), signal.SIGKILL)
        training.wait_attempt(2)
        assert shell.wait(ENDS_S) == 0, training.story()

    ends = [line for line in training.output().splitlines() if line.startswith(("first", "second", "third"))]
    assert ends == [f"first {ExitCode.STOPPED.value}", "second 137", "third 0"], training.output()
    assert lab.job(training.job_id).restarts == 0
    assert_complete(training, reference)


@pytest.mark.campaign
def test_a_bare_srun_is_a_place_for_one_supervisor(lab: Lab, reference: Training) -> None:
    """`srun stepkeeper run`: the Slurm steps of watchers and ranks run beside its own; two supervisors are refused."""
    shape = ("--nodes=1", "--gres=gpu:2", "--mem=2000", "--cpus-per-task=4")
    training = ByHand(lab, name="bare", nodes=1, run_args=("--tasks-per-node=2",), step_seconds=0.15)
    words = ("srun", "--nodes=2", "--ntasks=2", *training.line())
    refused = lab.run(*words, user=training.user, check=False, timeout_s=ENDS_S)
    assert refused.returncode == ExitCode.NOT_BATCH_PROCESS, refused.stderr
    assert "starts 2 supervisors" in refused.stderr

    with training.started("srun", "--ntasks=1", *shape, *training.line()) as shell:
        training.wait_step(5)
        acts.kill_rank(training)
        assert shell.wait(ENDS_S) == ExitCode.FINISHED, training.story()

    assert len(training.launches()) == 2, training.story()
    assert_complete(training, reference)


@pytest.mark.campaign
def test_a_slurm_step_of_a_batch_job_is_no_place_for_it(lab: Lab) -> None:
    """It looks like a bare srun, and Slurm tells that it is none."""
    training = ByHand(lab, name="in-a-step")
    line = " ".join(["srun", "--ntasks=1", *training.line()])
    job = lab.submit(f"{line}; echo ended with $?", sbatch_args=["--nodes=1"], user=training.user)
    lab.wait_ended(job)

    assert f"ended with {ExitCode.NOT_BATCH_PROCESS.value}" in lab.output(job), lab.output(job)


def test_a_job_of_several_parts_is_refused_and_told_why(lab: Lab) -> None:
    training = ByHand(lab, name="het")
    script = "#!/bin/bash\n#SBATCH --nodes=1\n#SBATCH hetjob\n#SBATCH --nodes=1\n" + f"exec {_words(training.line())}\n"
    job = lab.submit(script, sbatch_args=[f"--output={training.log}"], user=training.user)
    found = lab.wait_ended(job)

    assert found.exit_code == f"{ExitCode.NO_SLURM.value}:0", training.output()
    assert "heterogeneous job" in training.output()
    assert not training.run_dir.exists()


@pytest.mark.campaign
@pytest.mark.parametrize("mode", ["append", "as the site has it"])
def test_a_log_that_each_attempt_empties_is_told(lab: Lab, mode: str) -> None:
    """A batch script that says nothing of it gets what the site has set: JobFileAppend=0, as everywhere by default."""
    script = Training.script if mode == "append" else plain_script(lab)
    training = Training(lab, name=f"open-{mode[:6]}", steps=400, script=script).submit()
    training.wait_step(3)
    lab.requeue(training.job_id)
    training.wait_attempt(1)
    training.until(lambda: any(attempt == 1 for attempt, _ in said(training, "decision")), "the second attempt's log")
    attempts = {attempt for attempt, _ in said(training, "attempt_started")}
    warned = said(training, "log_emptied")
    lab.cancel(training.job_id)
    training.wait_end()

    assert attempts == ({0, 1} if mode == "append" else {1})
    for attempt in (0, 1):
        kept = (training.run_dir / "logs" / f"attempt-{attempt:03d}" / "supervisor.jsonl").read_text()
        assert f'"attempt": {attempt}' in kept, kept
        assert "attempt_started" in kept, kept
    assert bool(warned) == (mode != "append"), training.output()


def _words(line: Sequence[str]) -> str:
    return " ".join(line)


def _supervisor(training: Training) -> int:
    """The pid that the lease names."""
    return int(json.loads((training.run_dir / "lease.json").read_text())["pid"])
