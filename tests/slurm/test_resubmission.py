"""What sbatch is told when a job is submitted again: read off `scontrol show job` of older and newer Slurms."""

from __future__ import annotations

from pathlib import Path

import pytest

from stepkeeper.slurm.client import SlurmError
from stepkeeper.slurm.resubmission import (
    CONTINUES,
    Resubmission,
    comment_of,
    environment_of,
    followed_by,
    marker,
    plan,
)

CAPTURED = Path(__file__).with_name("captured")
SCRIPT = '#!/bin/bash\n#SBATCH --signal=B:USR1@120\n#SBATCH --no-kill\nexec stepkeeper run "$@"\n'
OLDER = (
    "JobId=7 JobName=a b UserId=ada(5) GroupId=ada(60) MCS_label=N/A Priority=1 Nice=6 Account=physics QOS=normal "
    "JobState=RUNNING Reason=None Dependency=(null) Requeue=0 Restarts=2 BatchFlag=1 TimeLimit=00:10:00 TimeMin=N/A "
    "Deadline=N/A Partition=train ReqNodeList=(null) ExcNodeList=n9 NodeList=n[1-2] BatchHost=n1 NumNodes=2 NumCPUs=8 "
    "NumTasks=4 CPUs/Task=2 ReqB:S:C:T=0:0:*:* Socks/Node=* NtasksPerN:B:S:C=2:0:*:* CoreSpec=* MinCPUsNode=4 "
    "MinMemoryNode=2000M MinTmpDiskNode=0 Features=a100&ib DelayBoot=00:00:00 OverSubscribe=OK Contiguous=0 "
    "Licenses=(null) Network=(null) Command=/home/ada/job.sh WorkDir=/home/ada/my work Comment=for MinMemoryNode=1 "
    "StdErr=/home/ada/50%.err StdIn=/dev/null StdOut=/home/ada/x y.log Power= TresPerNode=gres:gpu:a100:4 "
    "MailUser=ada MailType=END "
)
NEWER = (
    "JobId=7 ArrayJobId=5 ArrayTaskId=3 JobName=x UserId=ada(5) GroupId=ada(60) Priority=1 Nice=0 Account=(null) "
    "QOS=(null) Requeue=1 Restarts=0 TimeLimit=UNLIMITED Deadline=N/A Partition=train NumNodes=1 NumCPUs=2 NumTasks=2 "
    "CPUs/Task=1 NtasksPerN:B:S:C=0:0:*:* CoreSpec=* MinMemoryCPU=500M MinTmpDiskNode=0 OverSubscribe=NO Exclusive=NO "
    "Contiguous=0 Command=/x.sh SubmitLine=sbatch -k --signal=B:USR1@60 "
    "x.sh python train.py --name two words "
    "WorkDir=/w StdErr= StdIn=/dev/null StdOut=/w/5_3.out TresPerNode=gres/gpu:2 TresPerTask=cpu=1"
)


def planned(shown: str, script: str = SCRIPT, words: tuple[str, ...] = (), nodes: int = 2, **environment: str):
    return plan(shown, script, environment, words, nodes=nodes, exclude="n9,n3", comment="c")


def test_shape_limits_and_places_are_those_of_the_job() -> None:
    again = planned(OLDER)

    assert set(again.options) >= {
        "--dependency=afterany:7", "--job-name=a b", "--partition=train", "--account=physics", "--qos=normal",
        "--time=00:10:00", "--nodes=2", "--ntasks=4", "--ntasks-per-node=2", "--cpus-per-task=2", "--mem=2000M",
        "--gres=gpu:a100:4", "--constraint=a100&ib", "--exclude=n9,n3", "--nice=6", "--chdir=/home/ada/my work",
        "--output=/home/ada/x y.log", "--error=/home/ada/50%%.err", "--open-mode=append", "--no-requeue",
        "--mail-user=ada", "--mail-type=END", "--export=ALL",
    }  # fmt: skip
    assert again.directory == "/home/ada/my work"
    assert not [option for option in again.options if "(null)" in option or option.startswith("--exclusive")]


def test_newer_slurms_show_what_sbatch_was_told() -> None:
    again = planned(NEWER, "#!/bin/sh\n", nodes=1)

    assert set(again.options) >= {"--signal=B:USR1@60", "--no-kill", "--gres=gpu:2", "--mem-per-cpu=500M", "--array=3"}
    assert not [option for option in again.options if option.startswith(("--error", "--gpus-per-task", "--exclusive"))]
    assert again.unknown == ("quotes in the batch script's arguments",)


def test_a_job_that_gave_nodes_back_asks_for_all_of_them_again() -> None:
    again = planned(OLDER, nodes=3)

    assert "--nodes=3" in again.options
    assert not [option for option in again.options if option.startswith("--ntasks=")]


def test_the_supervisors_own_words_tell_the_arguments_exactly() -> None:
    words = ("run", "python", "train.py", "--name", "two words")

    assert planned(NEWER, words=words).arguments == words[1:]
    assert planned(NEWER, words=words).unknown == ()
    assert planned(NEWER).arguments == ("python", "train.py", "--name", "two", "words")


def test_gpus_of_a_directive_are_replaced_not_added_to() -> None:
    again = planned(OLDER, "#!/bin/sh\n#SBATCH -N2 --gpus-per-node=a100:8\n")

    assert "--gpus-per-node=a100:4" in again.options
    assert not [option for option in again.options if option.startswith("--gres")]


def test_what_cannot_be_known_is_named() -> None:
    unknown = " ".join(planned(OLDER + "TresBind=gpu:closest", "#!/bin/sh\n").unknown)

    assert all(option in unknown for option in ("--signal", "--no-kill", "--gpu-bind"))
    assert planned(OLDER).unknown == ()


def test_the_run_is_told_even_where_nothing_else_is_exported() -> None:
    assert f"--export={CONTINUES}" in planned(OLDER, SLURM_EXPORT_ENV="NONE").options
    assert f"--export=HOME,{CONTINUES}" in planned(OLDER, SLURM_EXPORT_ENV="HOME").options


def test_the_environment_is_ours_without_what_belongs_to_the_job() -> None:
    ours = {
        "PATH": "/bin", "SLURM_CONF": "/etc/slurm.conf", "SLURM_RESTART_COUNT": "3", "SLURM_NTASKS": "2",
        "SBATCH_EXPORT": "NONE", "CUDA_VISIBLE_DEVICES": "0", "STEPKEEPER_WATCHER": "{}", CONTINUES: "3:/old",
        "STEPKEEPER_KEPT_PYTHONPATH": "/lib", "STEPKEEPER_SPARES": "1",
    }  # fmt: skip

    assert environment_of(ours, "/run", "7") == {
        "PATH": "/bin", "SLURM_CONF": "/etc/slurm.conf", CONTINUES: "7:/run", "PYTHONPATH": "/lib",
        "STEPKEEPER_SPARES": "1",
    }  # fmt: skip


def test_a_job_that_follows_is_known_by_its_comment() -> None:
    ours = marker(OLDER)
    listing = f"8|for ada {ours}\n7|for ada stepkeeper:after=6.0\n9|stepkeeper:after=7.1\n"

    assert ours == "stepkeeper:after=7.2"
    assert followed_by(listing, ours) == 8
    assert followed_by(listing, "stepkeeper:after=9.0") is None
    assert comment_of(listing, 7, ours) == f"for ada {ours}"
    assert comment_of("7|(null)\n", 7, ours) == ours


def test_the_line_for_a_person_is_whole() -> None:
    line = planned(OLDER).command("7", "/my run")
    assert line.startswith("cd '/home/ada/my work' && env 'STEPKEEPER_CONTINUES=7:/my run' sbatch ")
    assert line.endswith(" /home/ada/job.sh")
    without = Resubmission(options=("-N1",), arguments=(), script=None, directory="/w", unknown=())
    assert "scontrol write batch_script 7 batch.sh && env" in without.command("7", "/run")


def test_a_name_full_of_fields_misleads_nobody() -> None:
    again = planned((CAPTURED / "running.txt").read_text(), nodes=1)

    assert "--job-name=x JobState=COMPLETED UserId=0 Restarts=9" in again.options
    assert "--requeue" in again.options
    assert "--output=/home/ada/work/slurm-1.out" in again.options


def test_an_answer_that_is_none_is_refused() -> None:
    with pytest.raises(SlurmError, match="unexpected answer"):
        marker("slurm_load_jobs error")
