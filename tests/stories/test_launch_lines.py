"""Launch lines as users have them: each trains, loses its ranks, and goes on with the very same losses."""

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from stepkeeper.core import events as on
from stepkeeper.core.exits import ExitCode
from tests.lab import Lab
from tests.stories import acts
from tests.training import SMALL, Training, assert_complete, strict_script

pytestmark = [pytest.mark.slurm, pytest.mark.campaign]
INSTALL_S = 300.0
# without what would bring another torch
ACCELERATE = (
    "accelerate==1.15.0", "huggingface_hub==2.4.0", "safetensors", "pyyaml", "packaging", "psutil", "tqdm", "filelock",
    "fsspec", "httpx", "httpcore", "h11", "anyio", "sniffio", "idna", "certifi", "click", "typer", "numpy",
    "typing_extensions", "hf-xet", "shellingham", "rich", "pygments", "markdown-it-py", "mdurl",
)  # fmt: skip


SCRIPT = shlex.join(
    ("-m", "stepkeeper_trainer.examples.train_lm", "--steps=40", "--seed=7", "--checkpoint-every-steps=10",
     "--step-seconds-min=0.25", *SMALL)
)  # fmt: skip


def play(training: Training, line: str, *sbatch_args: str, **env: str) -> None:
    """Submit a batch script with the line as CMD, kill the ranks after a checkpoint, wait for the end."""
    training.job_id = training.lab.submit(
        f"#!/bin/bash\nexec {training.stepkeeper} run -- {line}\n",
        sbatch_args=["--mem=2000", "--requeue", "--open-mode=append", f"--output={training.log}", *sbatch_args],
        user=training.user,
        env={
            "STEPKEEPER_RUN_DIR": str(training.run_dir),
            "PATH": f"{training.python.parent}:/usr/bin:/bin",
            **env,
        },
    )
    training.wait_step(13)
    training.until(training.committed, "a checkpoint")
    acts.kill_ranks(training)
    training.wait_end()
    assert len(training.launches()) == 2, training.story()
    resumed = training.events(on.CheckpointChosen)[-1].event
    assert isinstance(resumed, on.CheckpointChosen)
    assert resumed.directory, training.story()


TWO_NODES = ("-N2", "--ntasks-per-node=1", "--gres=gpu:1")
LINES: dict[str, tuple[tuple[str, ...], str]] = {
    "a GPU for each task, which hides the others": (
        ("-N1", "--ntasks-per-node=2", "--gres=gpu:2", "--cpus-per-task=2"),
        (f"srun --gpus-per-task=1 -n2 bash -c '[[ $CUDA_VISIBLE_DEVICES != *,* ]] && exec python {SCRIPT} {{resume}}'"),
    ),
    "static torchrun in a shell with a pipe": (
        TWO_NODES,
        (
            "srun bash -c 'set -o pipefail; torchrun --nnodes=2 --nproc-per-node=1 --node-rank=$SLURM_NODEID "
            f"--master-addr=$MASTER_ADDR --master-port=$MASTER_PORT {SCRIPT} {{resume}} 2>&1 | cat'"
        ),
    ),
    "elastic torchrun, the rest by variables": (
        TWO_NODES,
        f"torchrun --nnodes=1:2 --rdzv-backend=c10d {SCRIPT}",
    ),
}


@pytest.mark.parametrize("name", LINES)
def test_a_users_line_trains_and_goes_on(lab: Lab, reference: Training, name: str) -> None:
    sbatch_args, line = LINES[name]
    training = Training(lab, name=f"line-{list(LINES).index(name)}")

    play(training, line, *sbatch_args)

    assert_complete(training, reference)


def test_several_programs_of_one_srun(lab: Lab, reference: Training) -> None:
    """Srun hands the words behind the file to each program: the resume argument as well."""
    training = Training(lab, name="line-programs")
    programs = training.work / "programs.conf"
    programs.write_text(f"0 {training.python} {SCRIPT}\n1 {training.python} {SCRIPT}\n")
    programs.chmod(0o644)

    play(training, f"srun -n2 --multi-prog {programs}", *TWO_NODES)

    assert_complete(training, reference)


def test_a_shell_scripts_file_with_torchrun_in_it(lab: Lab, reference: Training) -> None:
    """One torchrun a node, which hears where to resume from as the script's arguments."""
    training = Training(lab, name="line-file")
    script = training.work / "train.sh"
    script.write_text(
        "set -eo pipefail\n"
        "torchrun --nnodes $SLURM_NNODES --nproc-per-node 1 --node-rank $SLURM_NODEID --master-addr $MASTER_ADDR \\\n"
        f'    --master-port $MASTER_PORT {SCRIPT} "$@"\n'
    )
    script.chmod(0o644)

    play(training, f"bash {script}", *TWO_NODES)

    assert_complete(training, reference)


def test_a_script_that_bears_no_argument_resumes_by_the_variable(lab: Lab, reference: Training) -> None:
    """Its own parser would end it; the trainer library finds the checkpoint all the same."""
    training = Training(lab, name="line-strict")
    script = strict_script(training, shlex.split(SCRIPT)[2:])

    play(training, f"python {script}", *TWO_NODES)

    assert_complete(training, reference)
    assert "resume_argument_unknown" not in training.output()


def test_a_script_that_would_end_on_the_argument_is_told_so_at_its_first_launch(lab: Lab) -> None:
    training = Training(lab, name="line-told")
    script = training.work / "told.py"
    script.write_text("import argparse\n\nargparse.ArgumentParser().parse_args()\n")
    script.chmod(0o644)
    training.command = ("python3", str(script))
    training.run_args = ("--resume-argument",)
    training.submit().wait_end()

    assert "resume_argument_unknown" in training.output()
    assert "leave out --resume-argument" in training.output()


@pytest.fixture(scope="module")
def accelerate(lab: Lab) -> Path:
    """A directory with accelerate, beside the torch that is there."""
    place = lab.workdir("games") / "accelerate"
    done = subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", place, *ACCELERATE],
        capture_output=True, text=True, timeout=INSTALL_S, check=False,
    )  # fmt: skip
    if done.returncode:
        pytest.skip(f"accelerate cannot be installed here: {done.stderr.strip().splitlines()[-1]}")
    return place


def test_accelerate_launch(lab: Lab, reference: Training, accelerate: Path) -> None:
    training = Training(lab, name="line-accelerate")
    line = (
        "python -m accelerate.commands.launch --multi_gpu --num_machines $SLURM_NNODES "
        "--num_processes $SLURM_NNODES --machine_rank $SLURM_NODEID --main_process_ip $MASTER_ADDR "
        f"--main_process_port $MASTER_PORT --mixed_precision no --dynamo_backend no {SCRIPT} {{resume}}"
    )

    play(training, f"bash -c '{line}'", *TWO_NODES, PYTHONPATH=str(accelerate))

    assert_complete(training, reference)


def test_a_line_that_would_start_ranks_twice_is_refused_at_once(lab: Lab) -> None:
    training = Training(lab, name="line-twice", command=("bash", "-c", "srun python train.py | tee log")).submit()
    training.wait_end()

    assert lab.job(training.job_id).exit_code == f"{int(ExitCode.USAGE)}:0", training.output()
    assert "give the srun line itself" in training.output()
