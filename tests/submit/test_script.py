"""The batch script that `stepkeeper submit` renders."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import msgspec
import pytest

from stepkeeper.errors import StepkeeperError
from stepkeeper.submit.sbatch import Wanted, notice_s, render

WANTED = Wanted(
    command=("python", "train.py", "--text", "it's $HOME"),
    program=("/opt/stepkeeper/bin/stepkeeper",),
    options=("--spares", "1"),
    nodes="3",
    gpus_per_node="8",
    time="1-00:00:00",
    partition="gpu",
    account="lab",
    job_name="train",
    sbatch=("--mem=0", "--exclusive"),
    setup=("module load cuda", "source ~/envs/train/bin/activate"),
)
GOLDEN = """\
#!/bin/bash
#SBATCH --partition=gpu
#SBATCH --account=lab
#SBATCH --job-name=train
#SBATCH --nodes=3
#SBATCH --gpus-per-node=8
#SBATCH --time=1-00:00:00
#SBATCH --output=%x-%j.log
#SBATCH --mem=0
#SBATCH --exclusive
# Slurm, and the supervisor, may put the job back into the queue.
#SBATCH --requeue
# A lost node does not end the job: the watchers on the others keep it running.
#SBATCH --no-kill
# Each attempt appends to the log of those before.
#SBATCH --open-mode=append
# The supervisor alone gets SIGUSR1 so many seconds before the time limit.
#SBATCH --signal=B:USR1@120
set -eo pipefail
module load cuda
source ~/envs/train/bin/activate
trap '' USR1 TERM # until the supervisor handles them: by default they would end the job
# `exec`: Slurm signals only the batch process, and that must be the supervisor
exec /opt/stepkeeper/bin/stepkeeper run --spares 1 -- python train.py --text 'it'"'"'s $HOME'
"""


def test_the_script_holds_what_was_asked_for_and_what_the_supervisor_stands_on() -> None:
    assert render(WANTED) == GOLDEN


def test_it_is_bash(tmp_path: Path) -> None:
    script = tmp_path / "script"
    script.write_text(render(WANTED))
    subprocess.run(["bash", "-n", script], check=True, timeout=90)


def test_its_directives_are_those_of_the_shipped_script() -> None:
    shipped = (Path(__file__).parents[2] / "sbatch" / "stepkeeper.sbatch").read_text()
    directives = set(re.findall(r"^#SBATCH (.*)$", shipped, re.MULTILINE))
    assert directives <= set(re.findall(r"^#SBATCH (.*)$", render(WANTED), re.MULTILINE))


@pytest.mark.parametrize(
    ("save_s", "asked", "expected"), [(None, None, 120), (5.0, None, 120), (300.0, None, 660), (300.0, 90, 90)]
)
def test_the_notice_leaves_time_for_two_saves(save_s: float | None, asked: int | None, expected: int) -> None:
    wanted = msgspec.structs.replace(WANTED, save_s=save_s, notice_s=asked)
    assert notice_s(wanted) == expected
    assert f"--signal=B:USR1@{expected}" in render(wanted)


@pytest.mark.parametrize(
    "option", ["--signal=B:USR2@10", "--no-requeue", "--open-mode=truncate", "mem=0", "--mem=0\nrm"]
)
def test_an_option_that_would_undo_the_supervision_is_refused(option: str) -> None:
    with pytest.raises(StepkeeperError, match=r"supervisor|dashes|line break"):
        render(msgspec.structs.replace(WANTED, sbatch=(option,)))
