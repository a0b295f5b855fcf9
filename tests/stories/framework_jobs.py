"""Unmodified scripts of four frameworks as jobs on a lab, with Stepkeeper and alone: what befalls them."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from stepkeeper.core import events as on
from tests.frameworks import environments
from tests.lab import Lab
from tests.lab.jobs import ENDED
from tests.ports import reserve
from tests.stories import acts
from tests.training import Training

SCRIPTS = Path(__file__).parent / "scripts"
STEPS, SAVES_EVERY, EVALUATES_AT = 33, 5, 17
ACT_S = 120.0
OTHER_FILE_SYSTEM = "/dev/shm"  # as a node's /tmp is another one than the storage of checkpoints
_LOOK_S = 0.0005


@dataclass(frozen=True)
class Script:
    """A script as its users write it, and how it is told what to do."""

    framework: str
    environment: str  # of the tests, in which its package is
    name: str
    directory: str  # the option that names the directory of its checkpoints
    steps: str
    saves_every: str
    evaluates_every: str
    sleeps: str  # the option that says how long a step takes
    samples: int = 1  # by which that is divided
    arguments: tuple[str, ...] = ()
    checkpoint: str = "{step}"  # the name of a step's checkpoint
    saves_in_evaluation: bool = True  # at a notice; else behind it
    no_evaluation: tuple[str, ...] = ()  # further arguments, where the last step is evaluated whatever its number

    def command(
        self, python: Path, script: Path, out: Path, *, steps: int, step_s: float, evaluates_at: int
    ) -> list[str]:
        """Return the command line of one rank."""
        numbers = {
            self.directory: out, self.steps: steps, self.saves_every: SAVES_EVERY, self.evaluates_every: evaluates_at,
            self.sleeps: step_s / self.samples,
        }  # fmt: skip
        words = [str(word) for pair in numbers.items() for word in pair]
        return [str(python), str(script), *words, *self.arguments]


HUGGINGFACE = Script(
    "huggingface", "huggingface", "huggingface_trainer.py", "--output_dir", "--max_steps", "--save_steps",
    "--eval_steps", "--sample_seconds", 8, ("--eval_strategy", "steps", "--use_cpu", "True", "--ddp_backend", "gloo"),
    "checkpoint-{step}", no_evaluation=("--eval_strategy", "no"),
)  # fmt: skip
LIGHTNING = Script(
    "lightning", "lightning", "lightning_trainer.py", "--out", "--max_steps", "--save_steps", "--eval_steps",
    "--step_seconds", checkpoint="step={step}.ckpt",
)  # fmt: skip
ACCELERATE = Script(
    "accelerate", "huggingface", "accelerate_loop.py", "--output_dir", "--max_train_steps", "--checkpointing_steps",
    "--eval_steps", "--sample_seconds", 8, checkpoint="step_{step}",
)  # fmt: skip
DEEPSPEED = Script(
    "deepspeed", "deepspeed", "deepspeed_loop.py", "--save_dir", "--train_iters", "--save_interval", "--eval_interval",
    "--step_seconds", checkpoint="global_step{step}", saves_in_evaluation=False,
)  # fmt: skip
ALL = (HUGGINGFACE, LIGHTNING, ACCELERATE, DEEPSPEED)
each_script = pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.framework)


@dataclass
class Segment:
    """What rank 0 told between two starts of the script."""

    rows: list[str] = field(default_factory=list)

    @property
    def steps(self) -> list[int]:
        return [int(row.split()[0]) for row in self.rows if row[:1].isdigit()]


@dataclass
class Job(Training):
    """A script on the lab.  `alone`: a batch script with srun, as people have it, and Slurm's own requeue."""

    kind: Script = HUGGINGFACE
    alone: bool = False
    length: int = STEPS
    step_s: float = 0.15
    evaluates_at: int = EVALUATES_AT
    attach: str = "auto"
    arguments: tuple[str, ...] = ()  # further ones of the script
    change: tuple[str, str] = ("", "")  # a part of the script, and what stands in its place
    submitter: Callable[[Job], int] | None = None  # in place of the batch script, where it is alone

    @property
    def out(self) -> Path:
        return self.work / f"out-{self.name}"

    def checkpoint(self, step: int) -> Path:
        return self.out / self.kind.checkpoint.format(step=step)

    def begin(self, **environment: str) -> Job:
        """Submit it as root: the environment lies above that of the tests, which other users may not read."""
        python = environments.require(self.kind.environment)
        self.user = "root"
        self.work.mkdir(exist_ok=True)
        script = self.work / self.kind.name
        text, (before, after) = (SCRIPTS / self.kind.name).read_text(), self.change
        assert not before or text.count(before) == 1, before
        script.write_text(text.replace(before, after) if before else text)
        self.command = (
            tuple(
                self.kind.command(
                    python, script, self.out, steps=self.length, step_s=self.step_s, evaluates_at=self.evaluates_at
                )
            )
            + self.arguments
        )
        self.env = {
            "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "",
            "TOKENIZERS_PARALLELISM": "false", "DS_ACCELERATOR": "cpu", **environment,
        }  # fmt: skip
        if not self.alone:
            self.run_args = ("--attach", self.attach, *self.run_args)
            self.submit()
        else:
            self.submit_alone()
        return self

    def submit_alone(self) -> None:
        """`sbatch` a script with one srun line; environment variables as torchrun sets them."""
        assert self.command is not None
        if self.submitter is not None:
            self.job_id = self.submitter(self)
            return
        ranks = 'RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS exec "$@"'
        port = f"export MASTER_ADDR=127.0.0.1 MASTER_PORT={reserve()}"
        line = shlex.join(["srun", "--kill-on-bad-exit=1", "bash", "-c", ranks, "train", *self.command])
        self.job_id = self.lab.submit(
            f"#!/bin/bash\n{port}\n{line}\n",
            sbatch_args=[
                "--nodes=2", "--ntasks-per-node=1", "--gres=gpu:1", "--mem=2000", "--cpus-per-task=1", "--requeue",
                "--open-mode=append", f"--output={self.log}", f"--job-name={self.name}", *self.sbatch_args,
            ],
            user=self.user,
            env=self.env,
        )  # fmt: skip

    # --- what it tells ----------------------------------------------------------------------------

    def rows(self) -> list[str]:  # type: ignore[override]
        path = self.out / "told-0"
        text = path.read_text() if path.exists() else ""
        return text.rpartition("\n")[0].splitlines()

    def segments(self) -> list[Segment]:
        """Return what was told, by the starts of the script."""
        found: list[Segment] = []
        for row in self.rows():
            if row == "loading":
                found.append(Segment())
            else:
                found[-1].rows.append(row)
        return found

    def losses(self) -> dict[int, str]:
        """Return the loss of each step; where a step was done twice, the last one."""
        return {int(step): loss for row in self.rows() if row[:1].isdigit() for step, loss in [row.split()]}

    def chosen(self) -> list[int | None]:
        """Return the steps that launches were to begin from."""
        events = [record.event for record in self.events(on.CheckpointChosen)]
        return [event.step for event in events if isinstance(event, on.CheckpointChosen)]

    def passed_over(self) -> set[str]:
        events = [record.event for record in self.events(on.CheckpointChosen)]
        return {each.directory for event in events if isinstance(event, on.CheckpointChosen) for each in event.skipped}

    def done_twice(self) -> int:
        """Return how many steps were trained in vain: done, and done again."""
        return sum(len(segment.steps) for segment in self.segments()) - len(self.losses())

    def story(self) -> str:
        told = " | ".join(row.partition(" 0x")[0].partition(" -0x")[0] for row in self.rows()[-80:])
        there = sorted(path.name for path in self.out.iterdir()) if self.out.exists() else []
        return f"{super().story()}\n--- rank 0 told: {told}\n--- checkpoints: {there}"

    # --- what befalls it --------------------------------------------------------------------------

    def starts(self) -> int:
        return self.rows().count("loading")

    def until_started(self, count: int, timeout_s: float = ACT_S) -> bool:
        """Wait for a start of the script; false: the job has ended instead."""
        ended = []

        def is_there() -> bool:
            if self.starts() >= count:
                return True
            if self.lab.job(self.job_id).state in ENDED:
                ended.append(True)
            return bool(ended)

        self.until(is_there, f"start {count} of the script", timeout_s)
        return self.starts() >= count

    def until_step(self, step: int) -> None:
        self.until(
            lambda: max([0, *(s for each in self.segments()[-1:] for s in each.steps)]) >= step, f"step {step}", ACT_S
        )

    def rank_pid(self, rank: int) -> int:
        """Return the process of a rank."""
        found: list[int] = []

        def is_there() -> bool:
            for pid in acts.pids_of(self, batch=False):
                command = acts.command_of(pid)
                if self.kind.name in command and "wrapper.py" not in command and _variable(pid, "RANK") == str(rank):
                    found.append(pid)
            return bool(found)

        self.until(is_there, f"the process of rank {rank}", ACT_S)
        return min(found)


def _variable(pid: int, name: str) -> str:
    with contextlib.suppress(OSError), open(f"/proc/{pid}/environ", "rb") as file:
        for each in file.read().split(b"\0"):
            if each.startswith(name.encode() + b"="):
                return each.partition(b"=")[2].decode()
    return ""


# each returns when it has befallen the job


def preempted_in_warm_up(job: Job) -> None:
    """Before the first step of the first start."""
    job.until(lambda: job.starts() == 1, "the first start", ACT_S)
    acts.preempt(job)


def preempted_in_training(job: Job) -> None:
    """Between two saves: after the first one, since some scripts show with it where they save."""
    job.until_step(SAVES_EVERY + 2)
    acts.preempt(job)


def preempted_in_evaluation(job: Job) -> None:
    evaluating = [f"evaluating {EVALUATES_AT}"]
    job.until(lambda: [each.rows[-1:] for each in job.segments()[-1:]] == [evaluating], "the evaluation", ACT_S)
    acts.preempt(job)


def killed_in_a_save(job: Job, step: int) -> None:
    """SIGKILL from outside, to rank 0 alone, as soon as the checkpoint of a step begins to be there."""
    job.until_step(step - 2)
    pid, path = job.rank_pid(0), job.checkpoint(step)
    quickly(path.exists, f"{path}\n{job.story()}")
    os.kill(pid, signal.SIGKILL)


def killed_before_the_last_rank_has_saved(job: Job, step: int) -> None:
    """DeepSpeed: rank 1 stands still in its part of a save, and is killed once rank 0 has named the checkpoint."""
    job.until_step(step - 2)
    pid, tag = job.rank_pid(1), job.checkpoint(step)
    optimizer = tag / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    quickly(optimizer.exists, f"{optimizer}\n{job.story()}")
    os.kill(pid, signal.SIGSTOP)
    quickly(lambda: (job.out / "latest").read_text() == tag.name, f"latest to name {tag.name}\n{job.story()}")
    os.kill(pid, signal.SIGKILL)


def quickly(condition: Callable[[], bool], what: str) -> None:
    limit = time.monotonic() + ACT_S
    while not condition():
        assert time.monotonic() < limit, f"waited {ACT_S:g} s for {what}"
        time.sleep(_LOOK_S)


@contextlib.contextmanager
def another_file_system() -> Iterator[dict[str, str]]:
    """Return the environment of a node whose temporary files are not on the storage of the checkpoints."""
    directory = tempfile.mkdtemp(prefix="stepkeeper-story-", dir=OTHER_FILE_SYSTEM)
    try:
        yield {"TMPDIR": directory}
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def whole(lab: Lab, kind: Script, name: str = "whole", *, evaluates_at: int = EVALUATES_AT) -> dict[int, str]:
    """Return the losses of an uninterrupted run without Stepkeeper.

    Its exit code is not compared: gloo sometimes aborts a process that has finished, in the interpreter's exit.
    """
    job = Job(lab, name=f"{kind.framework}-{name}", kind=kind, alone=True, evaluates_at=evaluates_at).begin()
    job.wait_end(ACT_S)
    assert set(job.losses()) == set(range(1, STEPS + 1)), job.story()
    return job.losses()
