"""What scontrol prints about nodes (captured on Slurm 22.05.8), and what a real one does."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from stepkeeper.slurm.client import SlurmError
from stepkeeper.slurm.nodes import NodeCommands, owners, parse_nodes, parse_owned_job, parse_pids
from tests.lab import USERS, Lab

HEAD = (
    "NodeName=gpu1 Arch=x86_64 CoresPerSocket=1  CPUAlloc=0 CPUEfctv=8 CPUTot=8 CPULoad=1.30 "
    "AvailableFeatures=(null) ActiveFeatures=(null) Gres=gpu:2 NodeAddr=127.0.0.1 NodeHostName=vm Port=27601 "
    "Version=22.05.8 OS=Linux 6.18.44 #1 SMP PREEMPT_DYNAMIC @0  RealMemory=64000 AllocMem=0 FreeMem=22397 Sockets=8 "
    "Boards=1 State={state} ThreadsPerCore=1 TmpDisk=0 Weight=1 Owner=N/A MCS_label=N/A Partitions=train,urgent  "
    "BootTime=1795232651 SlurmdStartTime=1795246240 LastBusyTime=1795246241 CfgTRES=cpu=8,mem=62.50G,billing=8 "
    "AllocTRES= CapWatts=n/a CurrentWatts=0 AveWatts=0 ExtSensorsJoules=n/s ExtSensorsWatts=0 ExtSensorsTemp=n/s"
)
JOB = (
    "JobId=12 JobName={name} UserId=games(5) GroupId=games(60) MCS_label=N/A Priority={priority} Nice=0 "
    "Account=(null) QOS=(null) JobState=PENDING Reason={reason} Dependency=(null) Requeue=1 Restarts=2 BatchFlag=1 "
    "Reboot=0 ExitCode=0:0 EligibleTime=1795246241 StartTime=1795246242 EndTime=Unknown ReqNodeList=(null) "
    "ExcNodeList=gpu[1-2] NodeList=(null) Command=(null) WorkDir={directory} Comment={comment}"
)


def node(state: str, tail: str = "") -> str:
    return HEAD.format(state=state) + tail


def job(
    name: str = "train", reason: str = "BeginTime", priority: int = 1, directory: str = "/w", comment: str = ""
) -> str:
    return JOB.format(name=name, reason=reason, priority=priority, directory=directory, comment=comment)


@pytest.mark.parametrize(
    ("printed", "states"),
    [
        ("IDLE", {"IDLE"}),
        ("MIXED+DRAIN", {"MIXED", "DRAIN"}),
        ("DOWN*+DRAIN", {"DOWN", "DRAIN"}),
        ("IDLE+DRAIN+NOT_RESPONDING", {"IDLE", "DRAIN", "NOT_RESPONDING"}),
        ("ALLOCATED$", {"ALLOCATED"}),
        ("idle~", {"IDLE"}),
    ],
)
def test_states_lose_their_signs(printed: str, states: set[str]) -> None:
    (found,) = parse_nodes(node(printed))

    assert found.states == states
    assert found.drained == ("DRAIN" in states)
    assert found.partitions == ("train", "urgent")


@pytest.mark.parametrize(
    ("tail", "reason", "at"),
    [
        (" Reason=fan [root@1795246241]", "fan", 1795246241.0),
        (" Reason=stepkeeper: x [a.1] State=DOWN [root@1795246241]", "stepkeeper: x [a.1] State=DOWN", 1795246241.0),
        (" Reason=fan [root@1795246241] Comment=Reason=y [x@2]", "fan", 1795246241.0),
        (" Reason=fan [slurm@2026-11-21T07:00:00]", "fan", None),
        (" Reason=no time", "no time", None),
        ("", "", None),
    ],
)
def test_a_reason_may_hold_anything(tail: str, reason: str, at: float | None) -> None:
    (found,) = parse_nodes(node("IDLE+DRAIN", tail))

    assert (found.reason, found.reason_at, found.states) == (reason, at, {"IDLE", "DRAIN"})


def test_an_answer_that_is_none_is_an_error() -> None:
    with pytest.raises(SlurmError, match="unexpected answer"):
        parse_nodes("NodeName=a whatever")


def test_a_job_that_waits() -> None:
    found = parse_owned_job(job(), 12)

    assert (found.job_id, found.uid, found.state, found.restarts) == (12, 5, "PENDING", 2)
    assert (found.exclude, found.nodes, found.eligible_at, found.held) == ("gpu[1-2]", (), 1795246241.0, False)


@pytest.mark.parametrize(
    "changes", [{"reason": "JobHeldUser"}, {"reason": "job_requeued_in_held_state"}, {"priority": 0}]
)
def test_a_job_that_is_held(changes: dict[str, object]) -> None:
    assert parse_owned_job(job(**changes), 12).held  # type: ignore[arg-type]


@pytest.mark.parametrize("where", ["name", "directory", "comment"])
def test_nobody_becomes_another_user_by_a_name(where: str) -> None:
    """A job's name, directory and comment are its user's."""
    forged = "x UserId=root(0) GroupId=root(0) MCS_label=N/A Priority=1 JobState=RUNNING"

    with pytest.raises(SlurmError, match="2 owners"):
        parse_owned_job(job(**{where: forged}), 12)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["x UserId=root", "GroupId=root(0)", " UserId=root(0)\nJobId=13 UserId=a(1) GroupId="])
def test_half_a_forgery_is_none(name: str) -> None:
    try:
        assert parse_owned_job(job(name), 12).uid == 5
    except SlurmError:
        assert "\n" in name  # what a line feed tears apart belongs to nobody


def test_one_task_of_an_array_is_found_among_the_others() -> None:
    text = job().replace("JobId=12 ", "JobId=11 ArrayJobId=11 ArrayTaskId=1 ") + "\n" + job()

    assert parse_owned_job(text, 12).uid == 5
    with pytest.raises(SlurmError, match="another job"):
        parse_owned_job(text, 1)


def test_pids() -> None:
    assert parse_pids("PID      JOBID    STEPID\n1 12 batch 0 0\n-1 12 4294967292 - -\n2 9 0 0 0\n") == {
        12: (1,),
        9: (2,),
    }


def test_a_jobs_owner_is_who_started_its_processes(tmp_path: Path) -> None:
    for pid, uid in ((1, 1000), (2, 0), (3, 1001), (4, 0)):
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "status").write_text(f"Name:\tx\nUid:\t{uid}\t0\t0\t0\n")

    assert owners({7: (1, 2), 8: (3,)}, proc=tmp_path) == (1000, 1001)
    assert owners({7: (1,), 8: (4,)}, proc=tmp_path) == ()  # only Slurm's own is left of job 8
    assert owners({7: (1,), 8: (5,)}, proc=tmp_path) == ()  # it has ended
    assert owners({7: (os.getpid(),)}) == ((os.getuid(),) if os.getuid() else ())


def test_a_call_has_a_limit(tmp_path: Path) -> None:
    scontrol = tmp_path / "scontrol"
    scontrol.write_text("#!/bin/sh\nexec sleep 600\n")
    scontrol.chmod(0o755)
    client = NodeCommands({"PATH": f"{tmp_path}:{os.environ['PATH']}"}, 0.3)
    began = time.monotonic()

    with pytest.raises(SlurmError) as caught:
        client.drain("a", "b")

    assert caught.value.unreachable
    assert time.monotonic() - began < 300


# --- a real one -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def client(lab: Lab) -> NodeCommands:
    return NodeCommands({"SLURM_CONF": str(lab.place.conf)})


@pytest.mark.slurm
def test_a_real_node_is_drained_and_returned(lab: Lab, client: NodeCommands) -> None:
    name = lab.node_names[-1]
    before = time.time()

    client.drain(name, "stepkeeper: XID 79 GPU 0000:3b:00.0 | a=b [x.1]")
    try:
        (found,) = (each for each in client.peers(name) if each.name == name)
        assert (found.reason, found.drained, found.ours) == (
            "stepkeeper: XID 79 GPU 0000:3b:00.0 | a=b [x.1]",
            True,
            True,
        )
        assert found.reason_at is not None
        assert abs(found.reason_at - before) < 60
        assert client.node(name) == found
    finally:
        client.resume(name)

    assert not client.node(name).drained
    assert client.node(name).reason == ""


@pytest.mark.slurm
def test_peers_are_those_of_the_partitions(lab: Lab, client: NodeCommands) -> None:
    assert {each.name for each in client.peers(lab.node_names[0])} == set(lab.node_names)
    assert client.cluster_size() >= len(lab.node_names)
    with pytest.raises(SlurmError, match="knows no node nowhere"):
        client.peers("nowhere")


@pytest.mark.slurm
def test_the_jobs_of_one_node_are_told_without_the_controller(lab: Lab, client: NodeCommands) -> None:
    mine, other = lab.node_names[:2]
    job = lab.submit("sleep 600", sbatch_args=[f"-w{mine}"], user=USERS[0])
    lab.wait_job(job, "RUNNING")
    lab.until(lambda: client.jobs_here(mine).jobs == (job,), "the job's processes", 60)
    owned = client.owned_job(job)
    lab.stop_slurmctld()
    try:
        assert client.jobs_here(mine).jobs == (job,)
        assert client.jobs_here(other).jobs == ()
        with pytest.raises(SlurmError) as caught:
            NodeCommands({"SLURM_CONF": str(lab.place.conf)}, 4.0).node(mine)
        assert caught.value.unreachable
    finally:
        lab.start_slurmctld()
    lab.cancel(job)
    lab.wait_ended(job, 120)

    assert (owned.state, owned.nodes) == ("RUNNING", (mine,))


@pytest.mark.slurm
def test_an_arrays_last_task_is_addressed_and_not_the_array(lab: Lab, client: NodeCommands) -> None:
    """Its job id is the array's own: Slurm would take that for all tasks."""
    array = lab.submit("sleep 600", sbatch_args=["--array=0-2", "--begin=now+1hour"], user=USERS[0])
    for task in (0, 1):
        lab.run("scontrol", "update", f"JobId={array}_{task}", "Nice=1")
    last = client.owned_job(array)

    client.expedite(last, None, 1800)

    begins = [client.owned_job(number).eligible_at for number in (array, array + 1, array + 2)]
    lab.run("scancel", str(array))
    assert last.address == f"{array}_2"
    assert begins[0] is not None
    assert begins[0] < time.time() + 1900
    assert all(at is not None and at > time.time() + 3000 for at in begins[1:]), begins


@pytest.mark.slurm
def test_one_node_is_asked_for_without_the_list_of_all(lab: Lab, client: NodeCommands) -> None:
    """slurmctld packs all nodes for whoever asks for the list: thousands of agents must not."""
    name = lab.node_names[0]

    def requests(kind: str) -> int:
        found = [line for line in lab.run("sdiag").stdout.splitlines() if f"{kind} " in line and "count:" in line]
        return sum(int(line.split("count:")[1].split()[0]) for line in found)

    one, all_nodes = requests("REQUEST_NODE_INFO_SINGLE"), requests("REQUEST_NODE_INFO")
    found = client.node(name)

    assert (requests("REQUEST_NODE_INFO_SINGLE"), requests("REQUEST_NODE_INFO")) == (one + 1, all_nodes)
    assert (found.name, found.address, set(found.partitions)) == (name, "127.0.0.1", {"train", "urgent"})
    with pytest.raises(SlurmError, match="knows no node nowhere"):
        client.node("nowhere")
