"""What sbatch was told that Slurm does not show of a job that runs: the whole command line of the next one, golden."""

from __future__ import annotations

import pytest

from stepkeeper.slurm.resubmission import environment_of, plan

RUNNING = (
    "JobId=7 JobName=x UserId=ada(5) GroupId=ada(60) Priority=1 Nice=0 Account=(null) QOS=(null) Requeue=0 Restarts=0 "
    "TimeLimit=00:20:00 TimeMin=00:10:00 Deadline=N/A Partition=train NumNodes=2 NumCPUs=4 NumTasks=4 CPUs/Task=1 "
    "ReqB:S:C:T=0:1:*:2 NtasksPerN:B:S:C=2:0:1:* CoreSpec=* MinCPUsNode=5 MinMemoryNode=1G MinTmpDiskNode=0 "
    "Features=a100 Prefer=near BatchFeatures=login DelayBoot=00:05:00 OverSubscribe=OK Contiguous=0 Licenses=f:2 "
    "Network=(null) GresEnforceBind=Yes SpreadJob=Yes Switches=1@00:10:00 "
)
TAIL = "WorkDir=/w StdErr= StdIn=/dev/null StdOut=/w/x.out"
OLDER = f"{RUNNING}Command=/home/ada/job.sh {TAIL}"
LINE = (
    "SubmitLine=sbatch -N2-4 --partition=train,urgent -t 60 --gpu-bind=single:1 -m cyclic -k --acctg-freq=30 "
    "/home/ada/job.sh --nodes=9 --signal=B:TERM@1"
)
NEWER = f"{RUNNING}Command=/home/ada/job.sh {LINE} {TAIL} SegmentSize=2 ExpeditedRequeue=Yes StepMgrEnabled=Yes"
PLAIN = "#!/bin/sh\nexec stepkeeper run\n"
ALWAYS = (
    "--dependency=afterany:7", "--job-name=x", "--comment=c", "--begin=now", "--open-mode=append",
)  # fmt: skip
SHOWN = (
    "--ntasks-per-node=2", "--mincpus=5", "--sockets-per-node=1", "--ntasks-per-socket=1", "--threads-per-core=2",
    "--spread-job",
)  # fmt: skip
CHOICES = ("--time=60", "--prefer=near", "--constraint=a100")
AS_THEY_ARE = ("--time-min=00:10:00", "--batch=login", "--licenses=f:2",
    "--switches=1@00:10:00")  # fmt: skip
PLACES = ("--chdir=/w", "--output=/w/x.out")


def options(shown: str, script: str = PLAIN, nodes: int = 2, **environment: str) -> tuple[str, ...]:
    return plan(shown, script, environment, (), nodes=nodes, exclude="", comment="c").options


def test_the_whole_line_where_slurm_shows_its_own_command_line() -> None:
    """What stands behind the script's name is the script's."""
    assert options(NEWER) == (
        *ALWAYS, "--requeue=expedite", "--export=ALL", "--nodes=2-4", "--partition=train,urgent", *CHOICES, *SHOWN,
        "--stepmgr", "--gres-flags=enforce-binding", "--delay-boot=00:05:00", *AS_THEY_ARE, "--segment=2",
        "--mem=1G", *PLACES,
        "--acctg-freq=30", "--distribution=cyclic", "--gpu-bind=single:1", "--no-kill",
    )  # fmt: skip


def test_the_whole_line_where_it_does_not() -> None:
    environment = {
        "SLURM_HINT": "nomultithread", "SLURM_DISTRIBUTION": "plane", "SLURM_DIST_PLANESIZE": "4",
        "SLURM_OVERCOMMIT": "1", "SBATCH_PARTITION": "urgent,train",
    }  # fmt: skip
    without_threads = [option for option in SHOWN if "threads" not in option]
    assert options(OLDER, "#!/bin/sh\n#SBATCH --nodes 2-4 --time=60 # an hour\nexec x\n", **environment) == (
        *ALWAYS, "--no-requeue", "--export=ALL", "--nodes=2-4", "--partition=urgent,train", *CHOICES,
        *without_threads, "--gres-flags=enforce-binding", "--delay-boot=00:05:00", *AS_THEY_ARE, "--mem=1G", *PLACES,
        "--hint=nomultithread", "--distribution=plane=4", "--overcommit",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("directive", "held", "asked"),
    [
        ("-N2-4", 3, "2-4"),
        ("-N 2-4", 5, "5"),  # the command line said another number, which Slurm does not show
        ("--nodes=1-15:4", 5, "1-15:4"),
        ("--nodes=1-15:4", 4, "4"),
        ("--nodes=4,8,16", 8, "4,8,16"),
        ("--nodes=1k-2k", 2, "2"),
        ("--nodes=2", 2, "2"),
        ("--nodelist=n[1-4]", 4, "4"),
    ],
)
def test_a_choice_of_nodes_is_asked_for_again(directive: str, held: int, asked: str) -> None:
    found = options(OLDER, f"#!/bin/sh\n#SBATCH {directive}\n", nodes=held)

    assert [option for option in found if option.startswith("--nodes=")] == [f"--nodes={asked}"]


def test_the_last_directive_counts_and_none_behind_the_first_command() -> None:
    script = "#!/bin/sh\n#SBATCH -N1\n# a word\n\n#SBATCH -N1-3\ntrue\n#SBATCH -N2-9\n"

    assert "--nodes=1-3" in options(OLDER, script)


def test_tasks_of_a_chosen_number_of_nodes_are_counted_anew() -> None:
    def tasks(shown: str, script: str = PLAIN) -> list[str]:
        return [option for option in options(shown, script) if option.startswith("--ntasks=")]

    assert tasks(OLDER) == ["--ntasks=4"]
    assert tasks(OLDER, "#!/bin/sh\n#SBATCH -N1-3\n") == []
    assert tasks(OLDER, "#!/bin/sh\n#SBATCH -N1-3 -n4\n") == ["--ntasks=4"]


def test_variables_that_sbatch_reads_stay_where_slurm_does_not_show_what_they_said() -> None:
    ours = {"SBATCH_SIGNAL": "B:USR1@60", "SBATCH_NO_KILL": "1", "SBATCH_TIMELIMIT": "5", "SBATCH_PARTITION": "x"}

    kept = environment_of(ours, "/run", "7")

    assert kept.keys() & ours.keys() == {"SBATCH_SIGNAL", "SBATCH_NO_KILL"}
    unknown = plan(OLDER, PLAIN, ours, (), nodes=2, exclude="", comment="c").unknown
    assert unknown == ()
    assert len(plan(OLDER, PLAIN, {}, (), nodes=2, exclude="", comment="c").unknown) == 2


@pytest.mark.parametrize(
    ("shown", "script", "asked"),
    [
        ("Features=a100", "-C a100 --prefer=near", ["--prefer=near", "--constraint=a100"]),
        ("Features=near", "-C a100 --prefer=near", ["--prefer=near", "--constraint=a100"]),
        ("Features=near", "--prefer=near", ["--prefer=near"]),
        ("Features=a100", "--constraint=a100", ["--constraint=a100"]),
    ],
)
def test_what_was_preferred_is_not_demanded_of_the_next_job(shown: str, script: str, asked: list[str]) -> None:
    """Slurm shows the preferred features in place of the demanded ones while a job has them."""
    job = OLDER.replace("Features=a100 Prefer=near BatchFeatures=login", shown)
    found = options(job, f"#!/bin/sh\n#SBATCH {script}\n")

    assert [option for option in found if option.startswith(("--prefer", "--constraint"))] == asked


def test_no_limit_is_asked_for_as_such() -> None:
    """Slurm makes a year of it when a job starts."""
    job = OLDER.replace("TimeLimit=00:20:00 TimeMin=00:10:00", "TimeLimit=365-00:00:00 TimeMin=N/A")

    assert "--time=UNLIMITED" in options(job)


def test_memory_is_told_in_one_way_only() -> None:
    """Slurm shows what it has made of it for a node, too; sbatch refuses both."""
    job = OLDER.replace("MinMemoryNode=1G", "MinMemoryNode=0 MemPerTres=gres:gpu:50")
    found = options(job)

    assert [option for option in found if option.startswith("--mem")] == ["--mem-per-gpu=50"]
