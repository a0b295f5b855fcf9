"""The doctor on real clusters, as an ordinary user: one with every bad setting that a lab can have, one in order."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.lab.cluster import Lab
from tests.lab.newest import NOT_BUILT, found
from tests.lab.site import supervisor_python

USER = "games"
BAD = (
    "RequeueExit=20,23",
    "RequeueExitHold=26",
    "UnkillableStepTimeout=30",
    "SlurmdTimeout=0",
    "InactiveLimit=900",
    "SrunPortRange=50000-60000",
)
NAMED = {
    "RequeueExit": "problem",
    "RequeueExitHold": "problem",
    "JobRequeue": "warning",
    "SlurmdTimeout": "warning",
    "KillWait": "problem",
    "send_user_signal": "note",
    "UnkillableStepTimeout": "note",
    "InactiveLimit": "note",
    "SrunPortRange": "note",
    "JobFileAppend": "note",
    "requeue delay": "note",
}
PROBLEMS_CODE = 42


def doctor(lab: Lab, *options: str, env: dict[str, str] | None = None) -> tuple[int, dict[str, Any]]:
    words = (supervisor_python(), "-m", "stepkeeper", "doctor", "--json", *options)
    done = lab.run(*words, user=USER, env=env, check=False)
    return done.returncode, json.loads(done.stdout)


def levels(answer: dict[str, Any]) -> dict[str, str]:
    return {finding["subject"]: finding["level"] for finding in answer["findings"] if finding["level"] != "ok"}


@pytest.mark.campaign
def test_each_bad_setting_of_a_cluster_is_named(lab_factory: Callable[..., Lab]) -> None:
    bad = lab_factory(
        nodes=1, job_requeue=False, grace_time_s=0, send_user_signal=True, cred_expire_s=None, slurm_conf=BAD
    )
    code, answer = doctor(bad, "--save-s", "25")
    assert code == PROBLEMS_CODE
    assert levels(answer).items() >= NAMED.items(), answer


OTHER = (
    "PartitionName=shared Nodes=ALL MaxTime=01:00:00 OverSubscribe=FORCE:4 State=UP",
    "PartitionName=closed Nodes=ALL State=DOWN",
    "PartitionName=roots Nodes=ALL RootOnly=YES State=UP",
    "PartitionName=cancels Nodes=ALL PriorityTier=1 PreemptMode=CANCEL GraceTime=0 State=UP",
)
OF_PARTITION = {
    "train": {"GraceTime": "problem"},
    "shared": {"OverSubscribe": "warning"},
    "closed": {"partition": "problem"},
    "roots": {"partition": "problem"},
    "cancels": {"PreemptMode": "warning", "KillWait": "problem", "GraceTime": "warning"},
}


@pytest.mark.campaign
def test_what_is_wrong_with_each_partition_is_named(lab_factory: Callable[..., Lab]) -> None:
    bad = lab_factory(nodes=1, grace_time_s=5, linuxproc=True, slurm_conf=OTHER)
    for partition, named in OF_PARTITION.items():
        _, answer = doctor(bad, "--save-s", "90", "--partition", partition)
        found = levels(answer)
        assert found.items() >= named.items(), (partition, found)
        assert found["ProctrackType"] == "warning"
        assert all(each["remedy"] for each in answer["findings"] if each["level"] in ("warning", "problem")), answer


@pytest.mark.campaign
def test_what_stands_in_cgroup_conf_and_a_container_around_the_supervisor_are_named(
    lab_factory: Callable[..., Lab],
) -> None:
    """`scontrol show config` tells neither; no job runs meanwhile, so nobody else reads the file."""
    bad = lab_factory(nodes=1, grace_time_s=5, linuxproc=True, slurm_conf=OTHER)
    settings = bad.directory / "etc" / "cgroup.conf"
    before = settings.read_text()
    try:
        settings.write_text(f"{before}SignalChildrenProcesses=yes\n")
        _, answer = doctor(bad, env={"APPTAINER_CONTAINER": "/images/torch.sif"})
    finally:
        settings.write_text(before)
    assert levels(answer).items() >= {"SignalChildrenProcesses": "warning", "container": "warning"}.items(), answer
    assert "SignalChildrenProcesses" not in levels(doctor(bad)[1])


def test_a_cluster_in_order_has_no_problem(lab: Lab) -> None:
    code, answer = doctor(lab, "--save-s", "2")
    assert code == 0, answer
    machine = {"ProctrackType"} if lab.place.cgroup_mountpoint is None else set()  # no freezer: the lab says so itself
    assert {level for subject, level in levels(answer).items() if subject not in machine} <= {"note"}, answer


def test_inside_a_job_each_node_must_see_what_another_one_writes(lab: Lab) -> None:
    shared = lab.directory / "users" / USER / "doctor"
    program = f"{supervisor_python()} -m stepkeeper doctor --json --all --run-dir {shared} >{shared}/answer.json"
    done = lab.run(
        "sbatch",
        "--wait",
        "--nodes=2",
        "--output=/dev/null",
        "--wrap",
        f"mkdir -p {shared} && {program}",
        user=USER,
        cwd=shared.parent,
        timeout_s=300.0,
        check=False,
    )
    answer = json.loads((shared / "answer.json").read_text())
    (seen,) = [each for each in answer["findings"] if "2 nodes" in each["subject"]]
    assert seen["level"] == "ok", (seen, done.stderr)
    assert "seen everywhere" in seen["found"]
    assert [path.name for path in shared.iterdir()] == ["answer.json"], "what it wrote is gone"


def test_a_partition_that_does_not_exist_is_named_with_those_that_do(lab: Lab) -> None:
    done = lab.run(supervisor_python(), "-m", "stepkeeper", "doctor", "-p", "nowhere", user=USER, check=False)
    assert done.returncode != 0
    assert "no partition 'nowhere' here; there are: train, urgent" in done.stderr


@pytest.mark.newest
def test_on_the_newest_slurm_it_reads_the_same_settings(lab_factory: Callable[..., Lab]) -> None:
    """Their names and forms have changed since 22.05; the delay of a requeue has an option of its own."""
    if found() is None:
        pytest.skip(NOT_BUILT)
    bad = lab_factory(
        slurm="newest",
        nodes=1,
        job_requeue=False,
        grace_time_s=0,
        send_user_signal=True,
        cred_expire_s=None,
        slurm_conf=(*BAD, "SchedulerParameters=requeue_delay=90", "SlurmctldParameters=enable_expedited_requeue"),
    )
    code, answer = doctor(bad, "--save-s", "25")
    assert code == PROBLEMS_CODE
    assert levels(answer).items() >= {**NAMED, "enable_expedited_requeue": "note"}.items(), answer
    (delay,) = [each for each in answer["findings"] if each["subject"] == "requeue delay"]
    assert delay["found"] == "90 s"
