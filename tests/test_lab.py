"""The lab is a real Slurm: what the stories rely on is proved here, and that it leaves nothing behind."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.lab import USERS, Lab, LabOptions, processes
from tests.lab.cluster import REPOSITORY

pytestmark = pytest.mark.slurm


def test_jobs_run_as_ordinary_users_on_nodes_with_names_and_gpus_of_their_own(lab: Lab) -> None:
    """Each node has a host name of its own; GPUs are handed out as in production."""
    job = lab.submit(
        "srun --label bash -c 'echo \"$(hostname) $SLURMD_NODENAME $CUDA_VISIBLE_DEVICES $(id -un)\"'",
        sbatch_args=["-N2", "--ntasks-per-node=1", "--gres=gpu:2"],
        user=USERS[0],
    )
    done = lab.wait_ended(job)

    assert done.state == "COMPLETED"
    words = sorted(line.split() for line in lab.output(job).splitlines() if line.startswith(("0:", "1:")))
    assert words == [[f"{i}:", node, node, "0,1", USERS[0]] for i, node in enumerate(done.nodes)], lab.output(job)


def test_a_preemption_tells_the_tasks_at_once_and_the_batch_process_not(lab: Lab) -> None:
    """What makes a watcher on every node necessary: see slurm.conf, GraceTime."""
    job = lab.submit(
        "trap 'echo batch TERM' TERM\n"
        "srun bash -c 'trap \"echo task TERM; exit 0\" TERM; echo ready; sleep 600 & wait' & wait; sleep 3\n",
        sbatch_args=["-N1"],
        user=USERS[0],
    )
    lab.until(lambda: "ready" in lab.output(job), "the task's trap", 120)

    urgent = lab.preempt(job)
    lab.until(lambda: "task TERM" in lab.output(job), "SIGTERM to the task", 120)

    assert lab.job(job).preempted_at is not None
    assert "batch TERM" not in lab.output(job)
    lab.cancel(job)
    lab.release(urgent)


@pytest.mark.campaign
def test_a_node_and_the_controller_come_back(lab_factory) -> None:
    lab = lab_factory(nodes=2, slurmd_timeout_s=10)
    first, second = lab.node_names
    job = lab.submit("exec sleep 600", sbatch_args=["-N1", f"--nodelist={second}", "--no-requeue"], user=USERS[0])
    lab.wait_job(job, "RUNNING")

    lab.kill_node(second)
    assert not lab.pids_on(second)
    lab.stop_slurmctld()
    lab.start_slurmctld()
    lab.wait_job(job, lambda found: found.state in ("NODE_FAIL", "CANCELLED", "FAILED"), timeout_s=120)
    lab.start_node(second)

    assert lab.nodes()[first].is_up
    assert lab.nodes()[second].is_up


def test_two_labs_stand_side_by_side(lab: Lab) -> None:
    """Same job id, same machine: what happens in one must not reach the other."""
    with Lab(LabOptions(nodes=2)) as other:
        assert not set(other.node_names) & set(lab.node_names)
        mine = lab.submit("exec sleep 600", sbatch_args=["-N1"], user=USERS[0])
        theirs = [other.submit("exec sleep 600", sbatch_args=["-N1"], user=USERS[1]) for _ in range(mine)]
        lab.wait_job(mine, "RUNNING")
        other.wait_job(mine, lambda job: job.state in ("RUNNING", "PENDING"))

        for job in theirs:
            other.cancel(job)
        other.wait_ended(mine)

        assert lab.job(mine).state == "RUNNING"
        lab.cancel(mine)


def test_nothing_is_left_when_the_owner_is_killed() -> None:
    """`kill -9` of a test process must not leave a cluster behind: the guardian takes it down."""
    code = (
        "import time\n"
        "from tests.lab import Lab, LabOptions\n"
        "lab = Lab(LabOptions(nodes=2)).up()\n"
        "lab.wait_job(lab.submit('exec sleep 600', sbatch_args=['-N2'], user='games'), 'RUNNING')\n"
        "print(lab.directory, *lab.node_names, flush=True)\n"
        "time.sleep(600)\n"
    )
    owner = subprocess.Popen([sys.executable, "-c", code], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    directory, *nodes = owner.stdout.readline().split()
    limit = time.monotonic() + 60
    running: set[int] = set()
    while not running and time.monotonic() < limit:
        running = {pid for node in nodes for pid in processes.by_environment("SLURMD_NODENAME", node)}
    daemons = processes.by_environment(processes.LAB_VARIABLE, directory)

    os.kill(owner.pid, signal.SIGKILL)
    owner.wait(60)
    owner.stdout.close()
    limit = time.monotonic() + 90
    while time.monotonic() < limit and (Path(directory).exists() or any(map(processes.alive, running | daemons))):
        time.sleep(0.1)

    assert running
    assert daemons
    assert not Path(directory).exists()
    assert not [pid for pid in running | daemons if processes.alive(pid)]
    mountpoint = processes.cgroup_mountpoint()
    assert not [cgroup for node in nodes for cgroup in processes.cgroups_of(mountpoint, node)]


@pytest.mark.campaign
def test_a_lab_keeps_no_file_system_of_a_test_alive(lab_factory, tmp_path: Path) -> None:
    """Its controller has a mount namespace of its own, which begins as a copy of ours."""
    lab_factory(nodes=1)  # skips, or fails, where there can be no lab
    mounted = tmp_path / "mounted"
    mounted.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", mounted], check=True, timeout=60)
    try:
        with Lab(LabOptions(nodes=1, backup_controller=True)) as lab:
            own = {
                pid: Path(f"/proc/{pid}/mounts")
                for pid in processes.by_environment(processes.LAB_VARIABLE, str(lab.directory))
            }
            apart = [pid for pid in own if os.readlink(f"/proc/{pid}/ns/mnt") != os.readlink("/proc/self/ns/mnt")]

            assert apart
            assert not [pid for pid in apart if str(mounted) in own[pid].read_text()]
    finally:
        subprocess.run(["umount", mounted], check=True, timeout=60)


class Raced(Lab):
    """Somebody takes its port between the look and slurmctld's start."""

    taken: socket.socket | None = None
    first_port = 0

    def _place(self) -> None:
        super()._place()
        if self.taken is None:
            self.first_port = self.place.port
            self.taken = socket.create_server(("127.0.0.1", self.first_port))


@pytest.mark.campaign
def test_a_lab_whose_port_is_taken_tries_another(lab_factory) -> None:
    lab_factory(nodes=1)  # skips, or fails, where there can be no lab
    lab = Raced(LabOptions(nodes=1))
    try:
        lab.up()

        assert lab.place.port != lab.first_port
        assert list(lab.nodes()) == lab.node_names
    finally:
        lab.down()
        if lab.taken is not None:
            lab.taken.close()
