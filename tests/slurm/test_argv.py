"""Golden command lines: each option was found on a live cluster, and its loss costs a run."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

import msgspec
import pytest

from stepkeeper import __version__, wrapper
from stepkeeper.frameworks.following import Following
from stepkeeper.slurm.cmd import resume_argument, with_resume
from stepkeeper.slurm.launch import Geometry, own_standby_argv, standby_argv, training_argv, watcher_argv
from stepkeeper.supervisor.actions.launch import Job, Meeting, launch_argv, launch_environment
from stepkeeper.wrapper import rank_environment

PYTHON = [sys.executable, "-I", "-S", os.path.abspath(wrapper.__file__)]
STEP = (
    "--overlap --mem=0 --no-kill --kill-on-bad-exit=0 --wait=0 --input=none --label "
    "--output=/run/logs/%N.log --open-mode=append"
)
TWO = Geometry(tasks_per_node=4, cpus_per_task=8)


def job(*command: str, torchrun: bool = False, geometry: Geometry = TWO) -> Job:
    return Job(
        command=command,
        torchrun=torchrun,
        geometry=geometry,
        run_directory=Path("/run"),
        run_id="r1",
        attempt=2,
        socket="@stepkeeper-7-%N",
        takes_resume=True,
    )


def meeting(resume_from: str | None = None) -> Meeting:
    return Meeting(launch=3, nodes=("n1", "n2"), address="n1", port=29501, resume_from=resume_from)


def argv_of(what: Job, resume_from: str | None = None) -> list[str]:
    return launch_argv(what, meeting(resume_from), Path("/run/logs"))


def test_the_watchers_line():
    line = watcher_argv(("n1", "n2"), ("python", "-m", "watcher"))

    assert shlex.join(line) == (
        "srun --nodes=2 --ntasks=2 --ntasks-per-node=1 '--nodelist=n[1-2]' --cpus-per-task=1 --overlap --mem=0 "
        "--no-kill --kill-on-bad-exit=0 --wait=0 --cpu-bind=none --input=all --job-name=stepkeeper-watcher "
        "python -m watcher"
    )


def test_the_standbys_line_has_the_shape_of_the_training_step():
    line = standby_argv(("n1", "n2"), TWO, ("python", "standby.py"))

    assert shlex.join(line) == (
        "srun --nodes=2 --ntasks=8 --ntasks-per-node=4 '--nodelist=n[1-2]' --cpus-per-task=8 --overlap --mem=0 "
        "--no-kill --kill-on-bad-exit=0 --wait=0 --cpu-bind=none --input=all --job-name=stepkeeper-standby "
        "python standby.py"
    )


def test_the_standbys_of_an_own_line_are_placed_and_bound_as_its_ranks_and_speak_with_us():
    """Its options come first: those of ours that decide where words go must be the last ones."""
    line = own_standby_argv(["-n8", "--output=x", "--mem=9G"], ["env", "A=1"], ("python", "standby.py"))

    assert shlex.join(line) == (
        "srun --mem=0 -n8 --output=x --mem=9G --overlap --no-kill --kill-on-bad-exit=0 --wait=0 --input=all "
        "--output=all --error=all --job-name=stepkeeper-standby env A=1 python standby.py"
    )


@pytest.mark.parametrize(
    ("geometry", "tasks", "expected"),
    [
        (TWO, 4, (4, 8, False)),
        (TWO, 2, (2, 16, False)),
        (TWO, 64, (64, None, True)),
        (Geometry(tasks_per_node=1), 2, (2, None, True)),
    ],
)
def test_other_tasks_share_the_same_cpus(geometry: Geometry, tasks: int, expected: tuple[int, int | None, bool]):
    """torchrun starts as many ranks as its line says."""
    found = geometry.with_tasks(tasks)

    assert (found.tasks_per_node, found.cpus_per_task, found.overcommit) == expected


def test_the_watchers_see_all_gpus_and_tear_no_line():
    """`--gres=none` makes NVML blind, `--unbuffered` gives tasks a pty that tears lines."""
    line = " ".join(watcher_argv(("n1",), ("watcher",)))

    assert "gres" not in line
    assert "gpus" not in line
    assert "unbuffered" not in line


def test_one_task_a_gpu():
    line = argv_of(job("python", "train.py"))

    geometry = "--nodes=2 --ntasks=8 --ntasks-per-node=4 '--nodelist=n[1-2]' --cpus-per-task=8"
    program = shlex.join([*PYTHON, "--", "python", "train.py"])
    assert shlex.join(line) == f"srun {geometry} {STEP} --cpu-bind=none {program}"


def test_fewer_cpus_than_ranks_overcommits():
    line = argv_of(job("python", "train.py", geometry=Geometry(tasks_per_node=4, overcommit=True)))

    assert "--overcommit" in line
    assert not any(word.startswith("--cpus-per-task") for word in line)


def test_without_a_known_number_of_cpus_none_is_asked_for():
    line = training_argv(("n1",), Geometry(tasks_per_node=1), "/l/%N.log", ("x",))

    assert not any(word.startswith("--cpus-per-task") for word in line)


def test_the_users_own_srun_line_wins():
    """Our options stand first, so that what the user says again after them counts."""
    line = argv_of(job("srun", "-N1", "--mem=20G", "python", "train.py", "{resume}"), "/c/step_1")

    assert shlex.join(line) == f"srun {STEP} -N1 --mem=20G python train.py --resume-from /c/step_1"


def test_one_torchrun_a_node():
    line = argv_of(job("python", "train.py", torchrun=True))

    geometry = "--nodes=2 --ntasks=2 --ntasks-per-node=1 '--nodelist=n[1-2]' --cpus-per-task=32"
    torchrun = (
        "torchrun --nnodes=2 --nproc-per-node=4 --rdzv-backend=c10d --rdzv-endpoint=n1:29501 "
        "--rdzv-id=r1-2-3 --max-restarts=0 --no-python python train.py"
    )
    program = shlex.join([*PYTHON, "--agent", "--"])
    assert shlex.join(line) == f"srun {geometry} {STEP} --cpu-bind=none {program} {torchrun}"


def test_a_percent_sign_in_the_log_path_is_no_pattern():
    line = launch_argv(job("x"), meeting(), Path("/run/100%/logs"))

    assert "--output=/run/100%%/logs/%N.log" in line


@pytest.mark.parametrize(
    ("command", "resume_from", "expected"),
    [
        (["t.py"], None, ["t.py"]),
        (["t.py"], "/s", ["t.py", "--resume-from", "/s"]),
        (["t.py", "{resume}", "-x"], None, ["t.py", "-x"]),
        (["t.py", "{resume}", "-x"], "/s", ["t.py", "--resume-from", "/s", "-x"]),
        (["sh", "-c", "t.py {resume} | tee l"], None, ["sh", "-c", "t.py  | tee l"]),
        (["sh", "-c", "t.py {resume} | tee l"], "/a b", ["sh", "-c", "t.py --resume-from '/a b' | tee l"]),
    ],
)
def test_where_the_resume_argument_goes(command, resume_from, expected):
    assert with_resume(command, resume_argument(resume_from)) == expected


def test_what_the_ranks_find_in_their_environment():
    theirs = launch_environment(
        job("x"), meeting("/c/step_1"), {"HOME": "/h", "SLURM_NTASKS": "99", "PYTHONPATH": "/mine"}
    )

    assert theirs == {
        "HOME": "/h",
        "PYTHONPATH": "/mine",
        "STEPKEEPER_SOCKET": "@stepkeeper-7-%N",
        "STEPKEEPER_RELEASE": __version__,
        "STEPKEEPER_RUN_DIR": "/run",
        "STEPKEEPER_RUN_ID": "r1",
        "STEPKEEPER_ATTEMPT": "2",
        "STEPKEEPER_LAUNCH": "3",
        "STEPKEEPER_RESUME_FROM": "/c/step_1",
        "STEPKEEPER_SKIP_DATA": "",
        "STEPKEEPER_RESUME_NEWEST": "1",
        "STEPKEEPER_TASKS_PER_NODE": "4",
        "STEPKEEPER_ERROR_DIR": "/run/logs/attempt-002/launch-003/errors",
        "TORCH_FR_BUFFER_SIZE": "2000",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "/run/logs/attempt-002/launch-003/stacks/nccl-of-rank-",
        "WANDB_RUN_ID": "r1",
        "WANDB_RESUME": "allow",
        "MASTER_ADDR": "n1",
        "MASTER_PORT": "29501",
        "PYTHONUNBUFFERED": "1",
    }


@pytest.mark.parametrize(
    ("command", "appended", "wanted", "expected"),
    [
        (["t.py", "--x"], True, None, ["t.py", "--x", "--load", "/c", "--ckpt-step", "7"]),
        (["t.py", "--x"], False, None, ["t.py", "--x"]),
        (["t.py", "--x"], False, True, ["t.py", "--x", "--load", "/c", "--ckpt-step", "7"]),
        (["t.py", "--x"], True, False, ["t.py", "--x"]),
        (["t.py", "{resume}", "--x"], False, None, ["t.py", "--load", "/c", "--ckpt-step", "7", "--x"]),
        (["bash", "-c", "t.py {resume} | tee l"], True, None, ["bash", "-c", "t.py --load /c --ckpt-step 7 | tee l"]),
    ],
)
def test_the_arguments_of_a_framework_stand_in_place_of_our_own(command, appended, wanted, expected):
    """The script declares our own option too (`takes_resume`): the framework's checkpoint goes by the framework's."""
    following = Following(
        framework="megatron", title="Megatron", why="", directory=Path("/c"), where="", appended=appended
    )
    what = msgspec.structs.replace(job(*command), following=following, resume_argument=wanted)
    resumed = msgspec.structs.replace(meeting("/c/iter_0000007"), arguments=("--load", "/c", "--ckpt-step", "7"))

    line = launch_argv(what, resumed, Path("/run/logs"))

    assert line[line.index("--") + 1 :] == expected
    assert launch_environment(what, resumed, {})["STEPKEEPER_RESUME_FROM"] == "/c/iter_0000007"


def test_ranks_in_another_order_than_slurms_are_placed_by_a_host_file() -> None:
    """Slurm 26.05 refuses `--nodes` beside it, and the nodes are those of the file."""
    line = training_argv(("n4", "n2"), Geometry(tasks_per_node=2), "/l/%N.log", ("x",), in_slurms_order=False)

    assert line[:3] == ["srun", "--ntasks=4", "--distribution=arbitrary"]
    assert not any(word.startswith(("--nodes=", "--nodelist=")) for word in line)


def test_the_number_of_a_node_follows_its_ranks() -> None:
    """Slurm numbers the nodes of a host file in its own order; frameworks compute ranks from that number."""
    slurm = {"SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURM_NTASKS": "6", "SLURM_STEP_NUM_NODES": "3"}
    given = {**slurm, "SLURM_NODEID": "0", "SLURM_DISTRIBUTION": "arbitrary", "STEPKEEPER_TASKS_PER_NODE": "2"}

    assert rank_environment(dict(given), agent=False)["SLURM_NODEID"] == "2"
    assert rank_environment({**given, "SLURM_DISTRIBUTION": "block"}, agent=False)["SLURM_NODEID"] == "0"
