"""What a script in CMD shows before it runs."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import msgspec
import pytest

from stepkeeper.cli import run
from stepkeeper.config import resolve
from stepkeeper.core.exits import ExitCode
from stepkeeper.errors import StepkeeperError
from stepkeeper.submit import own_script
from stepkeeper.supervisor.actions.launch import launch_argv, launch_environment
from tests.slurm.test_argv import argv_of, job, meeting

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
        ("p.add_argument('--resume_from_checkpoint')\nargs = p.parse_args()\n", True),
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
    ("text", "takes"),
    [
        ("p.add_argument('--resume-from', type=str)\np.parse_args()\n", True),
        ('@click.option("--resume-from")\ndef main(resume_from): ...\n', True),
        ("import typer\ndef main(resume_from: str = ''): ...\ntyper.run(main)\n", True),
        ("@dataclass\nclass A:\n    resume_from: str | None = None\nHfArgumentParser(A)\n", True),
        ("p.add_argument('--resume_from')\n", False),
        ("p.add_argument('--resume-from-checkpoint')\n", False),
        ("# --resume-from is not known\np.parse_args()\n", False),
        ('"""Give no --resume-from."""\nraise SystemExit("no --resume-from, please")\n', False),
        ("def load(resume_from): ...\np.parse_args()\n", False),
        ("print 'of Python 2', p.add_argument('--resume-from')\n", False),
        ("os.environ['STEPKEEPER_RESUME_FROM']\n", False),
    ],
)
def test_a_python_script_that_takes_the_argument_is_known(
    tmp_path: Path,
    text: str,
    takes: bool,  # noqa: FBT001
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "train.py").write_text(text)
    (tmp_path / "train.sh").write_text('module load cuda\nexec torchrun --nproc-per-node 8 mine/train.py --lr 1 "$@"\n')
    (tmp_path / "deaf.sh").write_text("python mine/train.py\n")

    for line in ("python mine/train.py", "python -m mine.train --lr 1", "bash train.sh", "srun bash train.sh"):
        assert own_script.look(line.split(), tmp_path).takes is takes, line
    module = "python -m torch.distributed.run --nproc-per-node 8 mine/train.py"
    assert own_script.look(module.split(), tmp_path).takes is takes
    assert not own_script.look(["bash", "deaf.sh"], tmp_path).takes


def test_a_module_that_is_not_in_the_directory_is_not_missed(tmp_path: Path) -> None:
    assert own_script.look(["python", "-m", "installed.train"], tmp_path) == own_script.Found()


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("loss.backward()\n", True),
        ("loss.backward()\nmodel.load_state_dict(torch.load(last))\n", False),
        ("from stepkeeper_trainer import CheckpointManager\nloss.backward()\n", False),
        ("from mine import train\ntrain()\n", False),
    ],
)
def test_a_training_that_goes_on_from_nothing_is_told_so(tmp_path: Path, text: str, told: bool) -> None:  # noqa: FBT001
    (tmp_path / "train.py").write_text(text)
    line = ["python", "train.py"]

    said = own_script.doubts(line, own_script.look(line, tmp_path), append=None)

    assert ("starts from the beginning in each attempt" in said.no_way) is told


SAVES_ITSELF = """\
p.add_argument('--resume', default='', metavar='PATH')
p.add_argument('--epochs', type=int)
args = p.parse_args()
if args.resume:
    model.load_state_dict(torch.load(args.resume))
loss.backward()
torch.save(model.state_dict(), f'epoch_{epoch}.pt')
"""


@pytest.mark.parametrize(
    ("text", "line", "told"),
    [
        (SAVES_ITSELF, "python train.py", True),
        (SAVES_ITSELF, "python train.py {resume}", True),
        (SAVES_ITSELF, "torchrun --nproc-per-node 2 train.py --epochs 3", True),
        (SAVES_ITSELF, "srun -n2 python train.py", True),
        (SAVES_ITSELF, "python train.py --resume last.pt", False),
        (SAVES_ITSELF, "python train.py --resume=last.pt", False),
        (SAVES_ITSELF, "bash -c 'python train.py ${STEPKEEPER_RESUME_FROM:+--resume $STEPKEEPER_RESUME_FROM}'", False),
        (SAVES_ITSELF.replace("default=''", "default='last.pt'"), "python train.py", False),
        (SAVES_ITSELF.replace("default=''", "action='store_true'"), "python train.py", False),
        (SAVES_ITSELF.replace("loss.", "args.resume = max(glob.glob('*.pt'))\nloss."), "python train.py", False),
        (SAVES_ITSELF + "from stepkeeper_trainer import CheckpointManager\n", "python train.py", False),
        (SAVES_ITSELF + "import transformers\n", "python train.py", False),
        (SAVES_ITSELF.replace("torch.save", "save"), "python train.py", False),
        (SAVES_ITSELF.replace("torch.load(args", "torch.load('ckpt.pt')\nprint(args"), "python train.py", False),
        (SAVES_ITSELF.replace("torch.load(args.resume)", "torch.load(CKPT)"), "python train.py", False),
        (SAVES_ITSELF.replace("if args", "path = args.resume\nif args").replace("load(args.resume", "load(path"),
         "python train.py", True),
    ],
)  # fmt: skip
def test_a_script_whose_own_resume_option_nobody_gives_is_told_so(
    tmp_path: Path,
    text: str,
    line: str,
    told: bool,  # noqa: FBT001
) -> None:
    (tmp_path / "train.py").write_text(text)
    words = shlex.split(line)
    found = own_script.look(words, tmp_path)

    assert ("what its option --resume names" in own_script.doubts(words, found, append=None).no_way) is told
    assert own_script.doubts(words, found, append=False) == own_script.Doubts()
    assert not own_script.doubts(words, found, append=None, framework="generic").no_way


@pytest.mark.parametrize("tracker", ["wandb-resume", "resume-mlflow", "comet_resume", "neptune-resume-id"])
def test_a_trackers_option_resumes_no_training(tmp_path: Path, tracker: str) -> None:
    text = SAVES_ITSELF.replace("--resume", f"--{tracker}").replace("args.resume", f"args.{tracker.replace('-', '_')}")
    (tmp_path / "train.py").write_text(text)

    assert not own_script.look(["python", "train.py"], tmp_path).unasked


@pytest.mark.parametrize("text", ["x = " + "-" * 20_000 + "1\n", "x = " + "(" * 500 + ")" * 500, "x" + ".a" * 20_000])
def test_a_script_that_python_itself_cannot_parse_shows_nothing(tmp_path: Path, text: str) -> None:
    (tmp_path / "train.py").write_text(text + "\ntorch.save(1)\n")

    assert own_script.look(["python", "train.py"], tmp_path) == own_script.Found()


def test_a_look_at_the_script_that_fails_ends_no_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*_: object) -> None:
        raise RecursionError

    config = resolve.gather({}, {"HOME": str(tmp_path)}, site=tmp_path / "none").resolve()
    monkeypatch.setattr(own_script, "look", fails)

    assert run._script(("python", "train.py"), config) == (own_script.Found(), None)
    assert "RecursionError" in capsys.readouterr().err


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


@pytest.mark.parametrize("said", ["--resume-from /old/step_00000060", "--resume-from=/old/step_00000060"])
def test_a_resume_argument_of_the_first_start_is_superseded(said: str) -> None:
    """The trainer library would go on from it each time: what a script is given counts more than the variable."""
    given = msgspec.structs.replace(job("python", "t.py", *said.split(), "--lr", "1"), takes_resume=False)
    resumed = msgspec.structs.replace(meeting("/run/checkpoints/step_00000100"), answered=True)

    words = launch_argv(given, resumed, Path("/run/logs"))

    assert words == [*argv_of(given), "--resume-from", "/run/checkpoints/step_00000100"]


@pytest.mark.parametrize("line", ["python t.py", "torchrun t.py", "srun python t.py"])
@pytest.mark.parametrize(
    ("asked", "takes", "answered", "appended"),
    [
        (None, True, False, True),
        (None, True, True, False),  # the trainer library reads the variable
        (None, False, False, False),
        (True, False, True, True),
        (False, True, False, False),
    ],
)
def test_the_resume_argument_is_appended_where_the_script_takes_it_or_somebody_asks(
    line: str,
    asked: bool | None,  # noqa: FBT001
    takes: bool,  # noqa: FBT001
    answered: bool,  # noqa: FBT001
    appended: bool,  # noqa: FBT001
) -> None:
    given = msgspec.structs.replace(job(*line.split()), resume_argument=asked, takes_resume=takes)
    step = "/run/checkpoints/step_00000100"
    resumed = msgspec.structs.replace(meeting(step), answered=answered)
    argument = ["--resume-from", step]

    words = launch_argv(given, resumed, Path("/run/logs"))

    assert words == argv_of(given) + (argument if appended else [])
    assert launch_environment(given, resumed, {})["STEPKEEPER_RESUME_FROM"] == step
    placed = msgspec.structs.replace(given, command=(*given.command, "{resume}"))
    assert launch_argv(placed, resumed, Path("/run/logs"))[-2:] == argument


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
    unasked = own_script.doubts(shlex.split(line), found, append=None)

    assert (bool(said.no_place), bool(said.unknown)) == (no_place, unknown)
    assert unasked == msgspec.structs.replace(said, unknown=""), "an argument that is not appended ends nothing"
    assert own_script.doubts(shlex.split(line), found, append=False) == own_script.Doubts()
