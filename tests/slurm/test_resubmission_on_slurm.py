"""What a job was submitted with is what its successor is submitted with: on live clusters, from inside the job.

Both wait then: the successor, and a control that was submitted by hand with the very same words.  Of a job that waits,
Slurm shows all that it was asked for, so the two must be alike in every field that is not a number or an instant.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.lab import USERS, Lab
from tests.lab.newest import NOT_BUILT, found
from tests.lab.site import supervisor_python

pytestmark = pytest.mark.slurm
ME = USERS[0]
PER_JOB = frozenset(
    (
        "JobId", "Priority", "JobState", "Reason", "Dependency", "SubmitTime", "EligibleTime", "AccrueTime",
        "StartTime", "EndTime", "LastSchedEval", "Scheduler", "Comment", "SubmitLine", "Command", "SLUID", "NodeList",
        "SchedNodeList", "Restarts", "Requeue", "AllocNode:Sid", "StdOut", "StdErr", "ExcNodeList", "TRES", "ReqTRES",
        "Deadline", "OpenMode",
    )
)  # fmt: skip
# among what Slurm could choose, of a job that runs Slurm 22.05 tells its choice alone
UNSUPPORTED = frozenset(("NumNodes", "NumTasks", "NumCPUs", "TRES", "TimeLimit", "Partition", "Features", "Prefer"))
RESUBMIT = """
import json, os, sys, time
from stepkeeper.slurm.jobs import SlurmCommands

answer = SlurmCommands().resubmit(os.environ["SLURM_JOB_ID"], "/tmp/run", int(os.environ["SLURM_JOB_NUM_NODES"]))
print(json.dumps([answer.job_id, list(answer.unknown)]), flush=True)
time.sleep(300)
"""
# each asks for other things than Slurm would choose, and fits on a lab of three nodes
LINES = {
    "shape": "--nodes=1-2 --ntasks-per-node=2 --cpus-per-task=1 --mem=150 --time=30 --time-min=20 --nice=7 "
    "--gres=gpu:1 --gres-flags=disable-binding --mail-user=nobody --mail-type=END,FAIL --hint=nomultithread",
    "places": "-N 1-3 --ntasks=3 --mem-per-cpu=60 --partition=urgent,train --constraint=fast&lab --prefer=near "
    "--licenses=fluent:2 --contiguous --switches=1@01:00:00 --signal=B:USR1@90 --no-kill",
    "gpus": "-N1 --gpus=2 --cpus-per-gpu=1 --mem-per-gpu=50 --gpu-bind=single:1 --distribution=cyclic --exclusive",
    "layout": "-N1 -n2 --mincpus=3 --sockets-per-node=2 --ntasks-per-core=1 --overcommit --spread-job "
    "--delay-boot=5 --profile=none",
}


@pytest.fixture(scope="module", params=["installed", pytest.param("newest", marks=pytest.mark.newest)])
def lab(request: pytest.FixtureRequest, lab_factory: Callable[..., Lab]) -> Lab:
    if request.param == "newest" and found() is None:
        pytest.skip(NOT_BUILT)
    lab = lab_factory(slurm=request.param, nodes=3, slurm_conf=("Licenses=fluent:9",))
    lab.run("scontrol", "update", f"NodeName={','.join(lab.node_names)}", "AvailableFeatures=fast,lab,near",
        "ActiveFeatures=fast,lab,near")  # fmt: skip
    listed = lab.run("scontrol", "show", "reservation", "week", check=False)
    if "ReservationName=week" not in listed.stdout:
        lab.run("scontrol", "create", "reservation", "ReservationName=week", f"Users={ME}", "StartTime=now",
            "Duration=7-0", f"Nodes={','.join(lab.node_names)}", "Flags=IGNORE_JOBS")  # fmt: skip
    return lab


@pytest.fixture
def ours(lab: Lab) -> Path:
    path = lab.workdir(ME) / "resubmit.py"
    path.write_text(RESUBMIT)
    path.chmod(0o644)
    return path


@pytest.mark.parametrize("case", LINES)
@pytest.mark.parametrize(
    "directives",
    [
        pytest.param(False, id="command line", marks=pytest.mark.campaign),
        pytest.param(True, id="directives"),
    ],
)
def test_the_job_that_follows_asks_for_what_its_predecessor_asked_for(
    lab: Lab, ours: Path, case: str, *, directives: bool
) -> None:
    script = lab.workdir(ME) / f"{case}-{directives}.sh"
    given = LINES[case].split()
    lines = [f"#SBATCH {option}\n" for option in _joined(given)] if directives else []
    script.write_text(f"#!/bin/bash\n{''.join(lines)}exec {shlex.join([str(supervisor_python()), str(ours)])}\n")
    script.chmod(0o755)
    words = [
        "--no-requeue",
        "--reservation=week",
        "--job-name=alike",
        f"--output={script}.log",
        *([] if directives else given),
    ]
    log = Path(f"{script}.log")
    log.unlink(missing_ok=True)

    job = lab.submit(script, sbatch_args=words, user=ME)
    control = lab.submit(script, sbatch_args=[f"--dependency=afterany:{job}", *words], user=ME)
    try:
        lab.wait_job(job, "RUNNING", timeout_s=120)
        lab.until(lambda: log.exists() and log.read_text().endswith("\n"), f"the answer in {log}", 120)
        assert log.read_text().startswith("["), log.read_text()
        again, unknown = json.loads(log.read_text())
        new, old = lab.job(again).raw, lab.job(control).raw
    finally:
        lab.run("scancel", f"--user={ME}", "--name=alike")
        lab.until(lambda: not lab.run("squeue", "--noheader", "--name=alike").stdout, "the end of all three", 120)

    differ = {
        key: (old.get(key), new.get(key)) for key in (old.keys() | new.keys()) - PER_JOB if old.get(key) != new.get(key)
    }
    told = directives or lab.options.slurm == "newest"
    assert differ.keys() <= (frozenset() if told else UNSUPPORTED), (differ, unknown)
    assert new["Dependency"].startswith(f"afterany:{job}")


def _joined(words: Sequence[str]) -> list[str]:
    """Return one directive an option: `-N 1-3` are two words."""
    found: list[str] = []
    for word in words:
        if word.startswith("-"):
            found.append(word)
        else:
            found[-1] += f" {word}"
    return found
