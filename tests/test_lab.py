"""The lab tells the truth: what other tests conclude from it holds on a real cluster."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.lab import Lab, LabOptions, processes
from tests.lab.facts import JobFacts, hosts, pairs

pytestmark = pytest.mark.slurm
REPOSITORY = Path(__file__).resolve().parents[1]
UP_WITHIN_S = 10.0
TELL = 'trap "echo {0} heard TERM" TERM; for i in $(seq 300); do sleep 0.1; done'


@pytest.fixture(scope="module")
def small(slurm: None) -> Iterator[Lab]:  # noqa: ARG001
    """A lab of its own for this module: its nodes are killed."""
    with Lab(LabOptions(nodes=3, grace_time_s=5, kill_wait_s=3)) as lab:
        yield lab


@pytest.fixture
def submit(small: Lab) -> Iterator[Callable[..., int]]:
    """Submit a job of an ordinary user that is gone after the test."""
    jobs: list[int] = []

    def make(script: str, *args: str) -> int:
        jobs.append(small.submit(script, sbatch_args=["--open-mode=append", *args], user="games"))
        return jobs[-1]

    yield make
    for job in jobs:
        small.run("scancel", "--full", "--signal=KILL", str(job), check=False)
        small.run("scancel", str(job), check=False)
        small.wait_ended(job)


def test_up_in_time_with_idle_nodes(small: Lab) -> None:
    assert small.up_s < UP_WITHIN_S
    assert [node.state for node in small.nodes().values()] == ["IDLE"] * 3


def test_a_job_runs_as_an_ordinary_user_and_sees_its_gpus(small: Lab, submit: Callable[..., int]) -> None:
    job = submit("id -un; srun --gres=gpu:2 bash -c 'echo gpus $CUDA_VISIBLE_DEVICES'", "-N1", "--gres=gpu:2")

    assert small.wait_ended(job).state == "COMPLETED"
    assert small.output(job).split("\n") == ["games", "gpus 0,1", ""]


def test_the_batch_process_keeps_its_pid_through_exec(small: Lab, submit: Callable[..., int]) -> None:
    """The supervisor recognises itself as the batch process by this."""
    job = submit("#!/bin/bash\necho $SLURM_TASK_PID\nexec sleep 60")
    small.wait_job(job, lambda _: processes.name(small.batch_pid(job)) == "sleep")
    small.until(lambda: small.output(job), "the pid in the log", 5)

    assert int(small.output(job)) == small.batch_pid(job)


def test_at_the_preemption_decision_only_tasks_are_told(small: Lab, submit: Callable[..., int]) -> None:
    task, batch = TELL.format("task"), TELL.format("batch")
    script = f"srun -N2 bash -c '{task}' &\n{batch}"
    job = submit(script, "-N2", "--requeue")
    small.until(lambda: len(small.task_pids(job, 0)) == 2, "two tasks", 10)
    time.sleep(0.3)  # the shells set their traps

    decided = time.monotonic()
    urgent = small.preempt(job)

    small.wait_job(job, lambda found: found.preempted_at, 3)
    small.until(lambda: small.output(job).count("task heard TERM") == 2, "SIGTERM in both tasks", 3)
    assert time.monotonic() - decided < 3
    assert "batch heard TERM" not in small.output(job)
    assert small.wait_job(job, lambda found: found.restarts == 1, 20).excluded == ()
    small.wait_job(urgent, "RUNNING", 20)
    small.release(urgent)


def test_a_killed_node_is_dead_and_comes_back(small: Lab, submit: Callable[..., int]) -> None:
    job = submit("srun -N2 sleep 100 & setsid sleep 100 & wait", "-N2", "--no-kill")
    small.until(lambda: len(small.task_pids(job, 0)) == 2, "two tasks", 10)
    batch = small.job(job).batch_host
    other = next(node for node in small.job(job).nodes if node != batch)
    elsewhere = small.pids_on(other)

    small.kill_node(batch)

    assert small.pids_on(batch) == set()
    assert elsewhere <= small.pids_on(other) | {pid for pid in elsewhere if not processes.alive(pid)}
    assert other in small.task_pids(job, 0)
    small.start_node(batch)
    assert small.nodes()[batch].is_up


def test_steps_outlive_slurmd(small: Lab, submit: Callable[..., int]) -> None:
    job = submit("exec sleep 100")
    pid = small.batch_pid(job)
    node = small.job(job).batch_host

    small.kill_slurmd_only(node)

    assert processes.alive(pid)
    small.start_node(node)


def test_jobs_outlive_slurmctld(small: Lab, submit: Callable[..., int]) -> None:
    job = submit("exec sleep 100")
    pid = small.batch_pid(job)

    small.restart_slurmctld()

    assert small.job(job).state == "RUNNING"
    assert processes.alive(pid)


def test_a_cancel_and_a_requeue_differ_by_the_restart_count(small: Lab, submit: Callable[..., int]) -> None:
    """What the supervisor asks before it decides."""

    def after(act: Callable[[int], None]) -> JobFacts:
        job = submit(TELL.format("batch"), "--requeue")
        small.batch_pid(job)
        time.sleep(0.3)  # the shell sets its trap
        act(job)
        return small.wait_job(job, lambda found: found.state != "RUNNING")

    cancelled = after(lambda job: small.cancel(job, user="games"))
    requeued = after(lambda job: small.requeue(job, user="games"))

    assert (cancelled.state, cancelled.restarts) == ("COMPLETING", 0)
    assert (requeued.state, requeued.restarts) == ("COMPLETING", 1)


def test_labs_side_by_side_leave_each_other_alone(small: Lab, submit: Callable[..., int]) -> None:
    """Equal node names would share cgroups: a scancel in one lab would kill a job of the other."""
    job = submit("exec sleep 100")
    pid = small.batch_pid(job)
    with Lab(LabOptions(nodes=1)) as other:
        assert not set(other.node_names) & set(small.node_names)
        theirs = other.submit("exec sleep 100", user="news")
        other.batch_pid(theirs)
        other.cancel(theirs)
        other.wait_ended(theirs)

    assert processes.alive(pid)
    assert small.job(job).state == "RUNNING"


OWNER = """
import sys, time
from tests.lab import Lab, LabOptions
lab = Lab(LabOptions(nodes=2)).up()
job = lab.submit("trap '' TERM; env -i setsid sleep 1000 & srun -N2 env -i sleep 1000",
                 sbatch_args=["-N2"], user="games")
lab.until(lambda: len(lab.task_pids(job, 0)) == 2, "tasks", 20)
print(lab.directory, *lab.node_names, flush=True)
time.sleep(1000)
"""


def test_kill_9_of_the_owner_leaves_nothing(slurm: None) -> None:  # noqa: ARG001
    """No daemon, no job process (not even orphans without an environment), no cgroup, no directory."""
    owner = subprocess.Popen([sys.executable, "-c", OWNER], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True)
    try:
        assert owner.stdout is not None
        directory, *nodes = owner.stdout.readline().split()
        attached = Lab.attach(Path(directory))
        pids = {pid for node in nodes for pid in attached.pids_on(node)}
        pids |= processes.by_environment(processes.LAB_VARIABLE, directory)
        started = {pid: found[3] for pid in pids if (found := processes.stat(pid))}
        assert sum(processes.name(pid) == "sleep" for pid in started) == 3
    finally:
        owner.send_signal(signal.SIGKILL)
        owner.communicate(timeout=10)

    limit = time.monotonic() + 15
    while (os.path.exists(directory) or _left(started)) and time.monotonic() < limit:
        time.sleep(0.05)

    assert not _left(started)
    assert not os.path.exists(directory)
    mountpoint = processes.cgroup_mountpoint()
    assert [path for node in nodes for path in processes.cgroups_of(mountpoint, node)] == []


def _left(started: dict[int, int]) -> list[int]:
    return [pid for pid, ticks in started.items() if processes.alive(pid, ticks)]


def test_what_scontrol_prints_is_read() -> None:
    assert pairs("JobId=7 JobName=a b Reason=None") == {"JobId": "7", "JobName": "a b", "Reason": "None"}
    assert hosts("k1n[1-3,5],k1n9") == ("k1n1", "k1n2", "k1n3", "k1n5", "k1n9")
