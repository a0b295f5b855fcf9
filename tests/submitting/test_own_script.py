"""What a script in CMD shows before it runs."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import msgspec
import pytest

from stepkeeper.actions.launch import launch_environment
from stepkeeper.core.exits import ExitCode
from stepkeeper.errors import StepkeeperError
from stepkeeper.submitting import own_script
from tests.slurm_client.test_argv import argv_of, job, meeting

TORCHRUN = """\
#!/bin/bash
set -eo pipefail
# torchrun is what starts the ranks
export OMP_NUM_THREADS=4 NCCL_DEBUG=WARN
echo "torchrun on $(hostname)"; which torchrun
if [ -n "$DEBUG" ]; then set -x; fi
exec torchrun \\
    --nnodes "$SLURM_NNODES" \\
    --nproc-per-node 8 train.py "$@"
"""


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (TORCHRUN, 7),
        ("python -m torch.distributed.run --nproc-per-node=8 t.py $@", 1),
        ("cd /x && NCCL_DEBUG=INFO accelerate launch t.py $*", 1),
        ('export LAUNCHER="torchrun --nproc-per-node 8"\n$LAUNCHER t.py "${@}"', 1),
        ("apptainer exec --nv i.sif torchrun t.py $1", 1),
        ("time deepspeed --no_ssh t.py $@ 2>&1 | tee log", 1),
    ],
)
def test_a_script_that_starts_ranks_is_known_by_its_line(text: str, line: int) -> None:
    found = own_script.of_shell("train.sh", text)

    assert found == own_script.Found(starts_ranks=f"train.sh, line {line}: starts ranks itself: one task a node")


@pytest.mark.parametrize(
    "text",
    [
        "python train.py $@",
        "echo srun torchrun; printf torchrun; command -v srun >/dev/null; python t.py $@",
        "# srun python t.py\npython t.py $@  # not by torchrun",
        "cat <<EOF\nsrun python t.py\ntorchrun t.py\nEOF\npython t.py $@",
        "cat > job.sh <<-'END'\n\tmpirun t\n\tEND\npython t.py $@",
        'python t.py --note "started by srun" $@',
        "python t.py --launcher torchrun $@",
        "LAUNCH=srun\npython t.py $@",
        "bash -c '\ntrue\n' && python t.py $@",
        "",
    ],
)
def test_a_script_that_is_a_rank_shows_nothing(text: str) -> None:
    assert own_script.of_shell("train.sh", text or "exec python t.py $@") == own_script.Found()


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("module load cuda\nsrun python train.py $@", "line 2: srun"),
        ("exec srun -N2 python train.py $@ | tee log", "line 1: srun"),
        ("timeout 3600 /opt/mpi/bin/mpirun -np 8 ./train $@", "line 1: mpirun"),
        ("if true; then\n  mpiexec -n 8 ./train $@\nfi", "line 2: mpiexec"),
    ],
)
def test_a_script_that_starts_processes_on_all_nodes_is_refused(text: str, told: str) -> None:
    found = own_script.of_shell("train.sh", text)

    with pytest.raises(StepkeeperError, match=f"train.sh, {told} starts processes on all nodes") as refused:
        own_script.require_startable(found, torchrun=False)

    assert refused.value.code is ExitCode.USAGE


@pytest.mark.parametrize(
    ("text", "hears"),
    [
        ("python t.py", False),
        ("python t.py $@", True),
        ('python t.py "${@:2}"', True),
        ("python t.py --ckpt $STEPKEEPER_RESUME_FROM", True),
        ('shift; python t.py "$1"', True),
        ("kill $!; python t.py $HOME", False),
    ],
)
def test_a_script_that_passes_no_argument_on_is_known(text: str, hears: bool) -> None:  # noqa: FBT001
    assert (own_script.of_shell("t.sh", text).deaf == "") is hears


@pytest.mark.parametrize(
    ("text", "strict"),
    [
        ("import argparse\np = argparse.ArgumentParser()\np.add_argument('--lr')\nargs = p.parse_args()\n", True),
        ("p.add_argument('--resume-from')\nargs = p.parse_args()\n", False),
        ("p.add_argument('--resume_from_checkpoint')\nargs = p.parse_args()\n", False),
        ("args, rest = p.parse_known_args()\n", False),
        ("@click.command()\n@click.option('--lr')\ndef main(lr): ...\n", True),
        ("parser = HfArgumentParser(Mine)\nmine, = parser.parse_args_into_dataclasses()\n", True),
        ("import os\nfrom mine import train\ntrain()\n", False),
    ],
)
def test_a_python_script_that_would_end_on_the_argument_is_known(
    tmp_path: Path,
    text: str,
    strict: bool,  # noqa: FBT001
) -> None:
    (tmp_path / "train.py").write_text(text)

    assert (own_script.look(["python", "-u", "train.py", "--lr", "1"], tmp_path).strict != "") is strict


@pytest.mark.parametrize(
    ("line", "read"),
    [
        ("bash train.sh -x", True),
        ("bash -eu train.sh", True),
        ("env A=1 bash train.sh", True),
        ("./train.sh", True),
        ("./train", True),  # by its first line
        ("apptainer exec image.sif bash train.sh", True),
        ("srun -n2 ./train.sh", False),  # the user's own geometry
        ("bash -c 'exec ./train.sh'", False),
        ("python -m train.sh", False),
        ("python train.py --hook train.sh", False),
        ("bash nowhere.sh", False),
        ("./pipe.sh", False),
        ("./binary", False),
        ("./directory.sh", False),
    ],
)
@pytest.mark.timeout(120)  # a look at the pipe would not end
def test_which_word_is_the_script(tmp_path: Path, line: str, read: bool) -> None:  # noqa: FBT001
    for name in ("train.sh", "train"):
        (tmp_path / name).write_text(TORCHRUN)
    (tmp_path / "binary").write_bytes(b"#!/bin/sh\n\0torchrun t.py\n")
    (tmp_path / "directory.sh").mkdir()
    os.mkfifo(tmp_path / "pipe.sh")
    words = ["bash", "-c", "exec ./train.sh"] if "-c" in line else line.split()

    assert (own_script.look(words, tmp_path).starts_ranks != "") is read


def test_a_script_in_which_a_launcher_stands_is_started_once_a_node() -> None:
    given = msgspec.structs.replace(job("bash", "train.sh", "-x"), starts_ranks=True)

    line = argv_of(given, "/run/checkpoints/step_00000100")

    assert {"--ntasks=2", "--ntasks-per-node=1", "--cpus-per-task=32", "--agent"} <= set(line)
    assert shlex.join(line).endswith("-- bash train.sh -x --resume-from /run/checkpoints/step_00000100")
    assert given.tasks(("n1", "n2")) == 2
    assert launch_environment(given, meeting(), {})["PET_RDZV_ENDPOINT"] == "n1:29501"


@pytest.mark.parametrize("line", ["python t.py", "torchrun t.py", "srun python t.py"])
def test_without_a_resume_argument_only_the_variable_tells(line: str) -> None:
    given = msgspec.structs.replace(job(*line.split()), resume_argument=False)
    resumed = meeting("/run/checkpoints/step_00000100")

    assert argv_of(given, resumed.resume_from) == argv_of(given)
    assert launch_environment(given, resumed, {})["STEPKEEPER_RESUME_FROM"] == resumed.resume_from
    placed = msgspec.structs.replace(given, command=(*given.command, "{resume}"))
    assert argv_of(placed, resumed.resume_from)[-2:] == ["--resume-from", resumed.resume_from]


@pytest.mark.parametrize(
    ("line", "found", "no_place", "unknown"),
    [
        ("python t.py", own_script.Found(), False, False),
        ("python t.py", own_script.Found(strict="t.py ..."), False, True),
        ("python t.py {resume}", own_script.Found(strict="t.py ..."), False, False),
        ("bash t.sh", own_script.Found(deaf="t.sh ..."), True, False),
        ("srun bash t.sh", own_script.Found(deaf="t.sh ..."), True, False),
        ("bash -c 'python t.py'", own_script.Found(), True, False),
        ("bash -c 'python t.py $STEPKEEPER_RESUME_FROM'", own_script.Found(), False, False),
    ],
)
def test_what_is_doubtful_is_said_and_why(
    line: str,
    found: own_script.Found,
    no_place: bool,  # noqa: FBT001
    unknown: bool,  # noqa: FBT001
) -> None:
    said = own_script.doubts(shlex.split(line), found, append=True)

    assert (bool(said.no_place), bool(said.unknown)) == (no_place, unknown)
    assert own_script.doubts(shlex.split(line), found, append=False) == own_script.Doubts()
