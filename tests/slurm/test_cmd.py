"""Golden lines of what users write as CMD: each kind is started as often as it needs, and hears where to resume."""

from __future__ import annotations

import shlex
from pathlib import Path

import msgspec
import pytest

from stepkeeper.config.rank_settings import attach_variables
from stepkeeper.config.settings import RunSettings
from stepkeeper.core.exits import ExitCode
from stepkeeper.errors import StepkeeperError
from stepkeeper.slurm import cmd
from stepkeeper.slurm.cmd import Kind, kind, require_startable, takes_resume
from stepkeeper.supervisor.actions.launch import launch_environment
from tests.slurm.test_argv import PYTHON, STEP, argv_of, job, meeting

AGENT = f"{shlex.join([*PYTHON, '--agent', '--'])} "
A_RANK = f"{shlex.join([*PYTHON, '--'])} "
ONE_A_NODE = (
    f"srun --nodes=2 --ntasks=2 --ntasks-per-node=1 --nodelist=n[1-2] --cpus-per-task=32 {STEP} --cpu-bind=none "
)
ONE_A_GPU = f"srun --nodes=2 --ntasks=8 --ntasks-per-node=4 --nodelist=n[1-2] --cpus-per-task=8 {STEP} --cpu-bind=none "
STEPDIR = "/run/checkpoints/step_00000100"
RESUME = f"--resume-from {STEPDIR}"

LINES = {
    "a rank a GPU": ("python train.py --lr 1", f"{ONE_A_GPU}{A_RANK}python train.py --lr 1 {RESUME}"),
    "static torchrun": (
        "torchrun --nnodes=2 --nproc-per-node=8 train.py",
        f"{ONE_A_NODE}{AGENT}torchrun --nnodes=2 --nproc-per-node=8 train.py {RESUME}",
    ),
    "elastic torchrun": (
        "torchrun --nnodes 1:2 --rdzv-backend c10d --max-restarts 0 train.py {resume} -v",
        f"{ONE_A_NODE}{AGENT}torchrun --nnodes 2 --rdzv-backend c10d --max-restarts 0 train.py {RESUME} -v",
    ),
    "torchrun as a module": (
        "/opt/py/bin/python -m torch.distributed.run --nproc-per-node 8 train.py",
        f"{ONE_A_NODE}{AGENT}/opt/py/bin/python -m torch.distributed.run --nproc-per-node 8 train.py {RESUME}",
    ),
    "torchrun in a container": (
        "apptainer exec --nv image.sif torchrun train.py",
        f"{ONE_A_NODE}{AGENT}apptainer exec --nv image.sif torchrun train.py {RESUME}",
    ),
    "accelerate": (
        "accelerate launch --config_file c.yaml train.py",
        f"{ONE_A_NODE}{AGENT}accelerate launch --config_file c.yaml train.py {RESUME}",
    ),
    "accelerate, its machine's rank by the shell": (
        "bash -c 'exec accelerate launch --machine_rank $SLURM_NODEID train.py {resume}'",
        f"{ONE_A_NODE}{AGENT}bash -c 'exec accelerate launch --machine_rank $SLURM_NODEID train.py {RESUME}'",
    ),
    "accelerate as a module, and the script as one": (
        "python -m accelerate.commands.launch --multi_gpu -m mine.train {resume}",
        f"{ONE_A_NODE}{AGENT}python -m accelerate.commands.launch --multi_gpu -m mine.train {RESUME}",
    ),
    "accelerate, its own resume argument by a shell": (
        "bash -c 'accelerate launch t.py ${STEPKEEPER_RESUME_FROM:+--resume_from_checkpoint $STEPKEEPER_RESUME_FROM}'",
        (
            f"{ONE_A_NODE}{AGENT}bash -c 'accelerate launch t.py "
            "${STEPKEEPER_RESUME_FROM:+--resume_from_checkpoint $STEPKEEPER_RESUME_FROM}'"
        ),
    ),
    "a rank by uv": (
        "uv run --frozen --no-sync python train.py",
        f"{ONE_A_GPU}{A_RANK}uv run --frozen --no-sync python train.py {RESUME}",
    ),
    "torchrun by uv": (
        "uv run --frozen torchrun train.py {resume} -v",
        f"{ONE_A_NODE}{AGENT}uv run --frozen torchrun train.py {RESUME} -v",
    ),
    "accelerate by conda": (
        "conda run --no-capture-output -n train accelerate launch train.py",
        f"{ONE_A_NODE}{AGENT}conda run --no-capture-output -n train accelerate launch train.py {RESUME}",
    ),
    "a module loaded by a login shell": (
        "bash -lc 'module load cuda && exec python train.py {resume}'",
        f"{ONE_A_GPU}{A_RANK}bash -lc 'module load cuda && exec python train.py {RESUME}'",
    ),
    "own srun, every kind of option": (
        "srun -p gpu --mem=20G --cpu-bind=cores --gpus-per-task 1 --ntasks-per-node=4 -l --export=ALL,A=1 ./t {resume}",
        (
            f"srun {STEP} -p gpu --mem=20G --cpu-bind=cores --gpus-per-task 1 --ntasks-per-node=4 -l --export=ALL,A=1 "
            f"./t {RESUME}"
        ),
    ),
    "own srun with a container": (
        "srun --container-image=/i/t.sqsh --container-mounts=/scratch:/scratch python t.py",
        f"srun {STEP} --container-image=/i/t.sqsh --container-mounts=/scratch:/scratch python t.py {RESUME}",
    ),
    "a shell and a pipe": (
        "bash -c 'python train.py {resume} | tee \"$HOME/a b\"'",
        f"{ONE_A_GPU}{A_RANK}bash -c 'python train.py {RESUME} | tee \"$HOME/a b\"'",
    ),
    "a shell's script that reads its arguments": (
        "bash -c 'exec python train.py \"$@\"' train",
        f"{ONE_A_GPU}{A_RANK}bash -c 'exec python train.py \"$@\"' train {RESUME}",
    ),
    "a script file": ("./train.sh -x", f"{ONE_A_GPU}{A_RANK}./train.sh -x {RESUME}"),
    "own srun, with its path": (
        "/opt/slurm/bin/srun -N2 --gpus-per-task=1 -c 8 python train.py",
        f"/opt/slurm/bin/srun {STEP} -N2 --gpus-per-task=1 -c 8 python train.py {RESUME}",
    ),
    "torchrun in an own srun line": (
        "srun -n2 bash -c 'torchrun --node-rank $SLURM_NODEID --master-addr $MASTER_ADDR t.py {resume}'",
        f"srun {STEP} -n2 bash -c 'torchrun --node-rank $SLURM_NODEID --master-addr $MASTER_ADDR t.py {RESUME}'",
    ),
    "a shell in an own srun line, which reads the variable": (
        "srun bash -lc 'python t.py ${STEPKEEPER_RESUME_FROM:+--ckpt $STEPKEEPER_RESUME_FROM}'",
        f"srun {STEP} bash -lc 'python t.py ${{STEPKEEPER_RESUME_FROM:+--ckpt $STEPKEEPER_RESUME_FROM}}'",
    ),
    "several programs": (
        "srun --multi-prog programs.conf",  # srun hands further words to each program
        f"srun {STEP} --multi-prog programs.conf {RESUME}",
    ),
}


@pytest.mark.parametrize("name", LINES)
def test_a_line_is_started_as_it_is_meant(name: str) -> None:
    line, expected = LINES[name]

    assert shlex.join(argv_of(job(*shlex.split(line)), STEPDIR)) == shlex.join(shlex.split(expected))
    assert RESUME not in shlex.join(argv_of(job(*shlex.split(line)))), "an argument on the first start"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("python train.py --launcher torchrun", Kind.RANK),
        ("python -m train torchrun", Kind.RANK),
        ("bash -c 'python train.py; echo torchrun is not used'", Kind.RANK),
        ("bash -c 'cd /a&&torchrun train.py'", Kind.LAUNCHER),
        ("env A=1 OMP_NUM_THREADS=4 torchrun train.py", Kind.LAUNCHER),
        ("bash --norc -e -c 'torchrun train.py'", Kind.LAUNCHER),
        ('bash -c "torchrun \'train.py"', Kind.LAUNCHER),  # a quotation that does not end is the shell's to refuse
        ("accelerate config", Kind.RANK),
        ("ft_launcher --nproc-per-node=8 train.py", Kind.LAUNCHER),
        ("/opt/py/bin/deepspeed --no_ssh train.py", Kind.LAUNCHER),
        ("python train.py --deepspeed ds.json deepspeed", Kind.RANK),
        ("python -m deepspeed.launcher train.py", Kind.RANK),
    ],
)
def test_what_starts_ranks_is_told_from_what_is_one(line: str, expected: Kind) -> None:
    assert kind(shlex.split(line)) is expected


def test_a_launcher_is_expected_once_a_node() -> None:
    """Else the start of the launch would be waited for in vain."""
    assert job("torchrun", "t.py").tasks(("n1", "n2")) == 2
    assert job("python", "t.py").tasks(("n1", "n2")) == 8
    assert job("python", "t.py", torchrun=True).tasks(("n1", "n2")) == 2


@pytest.mark.parametrize(
    ("line", "torchrun", "word"),
    [
        ("bash -c 'srun python train.py | tee log'", False, "give the srun line itself"),
        ("bash -c 'cd /x; /usr/bin/srun python train.py'", False, "give the srun line itself"),
        ("env A=1 srun python train.py", False, "let CMD begin with srun"),
        ("/usr/bin/timeout 3600 srun -N2 python train.py", False, "let CMD begin with srun"),
        ("mpirun -np 16 python train.py", False, "mpirun starts processes on all nodes"),
        ("env A=1 /opt/mpi/bin/mpiexec -n 4 ./train", False, "mpiexec starts processes on all nodes"),
        ("torchrun train.py", True, "leave out one"),
        ("accelerate launch train.py", True, "leave out one"),
    ],
)
def test_what_would_start_ranks_twice_is_refused(line: str, torchrun: bool, word: str) -> None:  # noqa: FBT001
    with pytest.raises(StepkeeperError, match=word) as refused:
        require_startable(shlex.split(line), torchrun=torchrun)

    assert refused.value.code is ExitCode.USAGE


@pytest.mark.parametrize(
    "line",
    [
        "srun bash -c 'srun --version; train'",
        "python train.py srun",
        "bash srun.sh",
        "env A=1 t.py srun",
        "python t.py mpirun",
    ],
)
def test_other_words_srun_harm_nobody(line: str) -> None:
    require_startable(shlex.split(line), torchrun=False)


@pytest.mark.parametrize(
    ("line", "takes"),
    [
        ("bash -c 'python train.py'", False),
        ("srun bash -lc 'python train.py'", False),
        ("bash -c 'python train.py {resume}'", True),
        ("bash -c 'python train.py $STEPKEEPER_RESUME_FROM'", True),
        ("bash -c 'python train.py \"$@\"' x", True),
        ("python train.py", True),
    ],
)
def test_a_shell_script_without_a_place_for_the_argument_is_known(line: str, takes: bool) -> None:  # noqa: FBT001
    """The appended words would be `$0` of the script: nobody would hear of them."""
    assert takes_resume(shlex.split(line)) is takes


# --- the environment of a line ------------------------------------------------------------------------


def test_a_launcher_without_options_finds_its_rendezvous_in_the_environment() -> None:
    theirs = launch_environment(job("torchrun", "t.py"), meeting(), {"PET_NPROC_PER_NODE": "2", "SLURM_NNODES": "7"})

    assert {name: value for name, value in theirs.items() if name.startswith("PET_")} == {
        "PET_NNODES": "2",
        "PET_NPROC_PER_NODE": "2",  # the user's own
        "PET_MASTER_ADDR": "n1",
        "PET_MASTER_PORT": "29501",
        "PET_RDZV_ENDPOINT": "n1:29501",
        "PET_RDZV_ID": "r1-2-3",
    }
    assert "SLURM_NNODES" not in theirs


@pytest.mark.parametrize("line", ["python t.py", "srun torchrun t.py"])
def test_other_lines_find_nothing_of_a_rendezvous(line: str) -> None:
    assert not [name for name in launch_environment(job(*line.split()), meeting(), {}) if name.startswith("PET_")]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("srun python t.py", "8"),
        ("srun --gpus-per-task=1 -N2 python t.py", "8"),
        ("srun -n 4 python t.py", None),
        ("srun -n4 python t.py", None),
        ("srun --ntasks-per-node=4 python t.py", None),
        ("srun -c2 python t.py", None),
        ("srun --cpus-per-task=2 python t.py", None),
        ("python t.py", None),
    ],
)
def test_the_cpus_of_the_job_reach_an_own_line_that_leaves_them_to_it(line: str, expected: str | None) -> None:
    """Since 22.05 srun does not take them from sbatch, and each rank would have one."""
    theirs = launch_environment(job(*line.split()), meeting(), {"SLURM_CPUS_PER_TASK": "8"})

    assert theirs.get("SRUN_CPUS_PER_TASK") == expected


@pytest.mark.parametrize("line", ["python t.py", "torchrun t.py", "srun python t.py"])
def test_a_run_that_attaches_has_the_hook_first_on_the_python_path(line: str) -> None:
    attaching = msgspec.structs.replace(job(*line.split()), variables=attach_variables(RunSettings(attach="auto")))
    theirs = launch_environment(attaching, meeting(), {"PYTHONPATH": "/mine:"})
    alone = launch_environment(attaching, meeting(), {})

    site, mine = theirs["PYTHONPATH"].split(":", 1)
    assert (Path(site) / "sitecustomize.py").is_file()
    assert (mine, alone["PYTHONPATH"]) == ("/mine:", site)
    assert theirs["STEPKEEPER_ATTACH"] == "auto"
    assert "PYTHONPATH" not in launch_environment(job(*line.split()), meeting(), {})


def test_cpus_that_the_user_set_for_srun_stay() -> None:
    variables = {"SLURM_CPUS_PER_TASK": "8", "SRUN_CPUS_PER_TASK": "3"}

    assert launch_environment(job("srun", "x"), meeting(), variables)["SRUN_CPUS_PER_TASK"] == "3"


@pytest.mark.parametrize(
    "option", ["SLURM_GPUS_PER_TASK", "SLURM_GPU_BIND", "SLURM_TRES_PER_TASK", "SLURM_NTASKS_PER_GPU"]
)
def test_options_of_the_job_that_hide_gpus_are_kept_from_our_lines_and_left_to_own_ones(option: str) -> None:
    """A rank of ours sees all GPUs of its node, so that LOCAL_RANK is the number of one."""
    given = {option: "1"}

    assert option not in launch_environment(job("python", "t.py"), meeting(), given)
    assert option not in launch_environment(job("torchrun", "t.py"), meeting(), given)
    assert launch_environment(job("srun", "python", "t.py"), meeting(), given)[option] == "1"


# --- experiment trackers --------------------------------------------------------------------------------


@pytest.mark.parametrize("line", ["python t.py", "torchrun t.py", "srun python t.py"])
def test_each_attempt_goes_on_in_one_run_of_the_tracker(line: str) -> None:
    first = job(*line.split())
    later = msgspec.structs.replace(first, attempt=9)

    told = [launch_environment(each, meeting(), {}) for each in (first, later)]

    assert [each["WANDB_RUN_ID"] for each in told] == ["r1", "r1"]
    assert [each["WANDB_RESUME"] for each in told] == ["allow", "allow"]


@pytest.mark.parametrize("named", ["mine", ""])
def test_a_run_of_the_tracker_that_the_user_named_stays(named: str) -> None:
    theirs = launch_environment(job("x"), meeting(), {"WANDB_RUN_ID": named, "WANDB_RESUME": "must"})

    assert (theirs["WANDB_RUN_ID"], theirs["WANDB_RESUME"]) == (named, "must")


# --- for which lines a warm standby can stand in ----------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("srun python train.py", " | | python"),
        ("srun -N2 -n 8 --cpu-bind cores -- python3 -u -m train", "-N2 -n 8 --cpu-bind cores | | python3 -u"),
        ("srun -l env A=1 -u B numactl --localalloc python t.py", None),  # B is env's, and no word that we know
        ("srun -l env A=1 numactl --localalloc python t.py", "-l | env A=1 numactl --localalloc | python"),
        ("srun -J python -o python python -X dev t.py", "-J python -o python | | python -X dev"),
        ("srun --exclusive ./launch python t.py", None),
        ("srun --unheard-of python python t.py", None),
        ("srun bash -c 'python t.py'", None),
        ("srun --pty python t.py", None),
        ("srun -n1 --multi-prog python t.py", None),
        ("srun python -I t.py", None),
        ("srun env PYTHONPATH=src python t.py", None),
        ("srun", None),
        ("srun -n", None),
    ],
)
def test_what_of_an_own_line_starts_standbys(line: str, expected: str | None) -> None:
    """Nothing but Python is ever started beside training; what is not known is no standby's line."""
    found = cmd.own_standby(shlex.split(line))

    parts = None if expected is None else tuple(part.split() for part in expected.split("|"))
    assert (None if found is None else tuple(found)) == parts


LONG = "#!/bin/sh\n'''exec' \"/a long/bin/python\" \"$0\" \"$@\"\n' '''"  # as pip writes it


@pytest.mark.parametrize(
    ("line", "shebang", "expected"),
    [
        ("torchrun train.py", "#!/env/bin/python3\nimport re", ["/env/bin/python3", "-u"]),
        ("/env/bin/torchrun --nproc-per-node 2 -m train", "#!/usr/bin/env python3.12", ["python3.12", "-u"]),
        ("torchrun train.py", LONG, ["/a long/bin/python", "-u"]),
        ("torchrun train.py", "#!/bin/sh\nexec run-it", None),
        ("torchrun train.py", "", None),
        ("torchrun --no_python ./train t.py", "#!/env/bin/python", None),
        ("torchrun --run-path t.py", "#!/env/bin/python", None),
        ("torchrun ./train", "#!/env/bin/python", None),
        ("/x/python -X dev -m torch.distributed.run --nnodes=1 t.py --no-python", "", ["/x/python", "-u"]),
        ("python -m torch.distributed.launch --module train", "", ["python", "-u"]),
        ("python -m accelerate.commands.launch t.py", "", None),
        ("accelerate launch t.py", "#!/env/bin/python", None),
    ],
)
def test_how_torchrun_starts_its_ranks(line: str, shebang: str, expected: list[str] | None) -> None:
    assert cmd.torchrun_standby(shlex.split(line), cmd.python_of(shebang)) == expected
