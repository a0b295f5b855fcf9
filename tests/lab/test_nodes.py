"""The loss of a node is what it says: that node's processes, and no others."""

import time

import pytest

from tests.lab import USERS, Lab, LabOptions, processes

pytestmark = pytest.mark.slurm
SRUN_SETTLES_S = 0.7
WORD_TRAVELS_S = 2.0
TIMES = 3
"""A wrong order of kills loses the ranks in most runs, though not in every one."""


@pytest.mark.campaign  # as are the stories that lose the batch node
@pytest.mark.usefixtures("slurm")
def test_a_lost_batch_node_takes_no_rank_of_another_node_along() -> None:
    """Its srun must not live long enough to cancel the step: else a story blames the supervisor for lost ranks."""
    with Lab(LabOptions(nodes=2, kill_wait_s=3)) as lab:
        for _ in range(TIMES):
            job = lab.submit(
                "srun -N2 --no-kill sleep 100 & wait", sbatch_args=["-N2", "--no-kill", "--no-requeue"], user=USERS[0]
            )
            lab.until(lambda job=job: len(lab.task_pids(job, 0)) == 2, "two tasks", 120)
            time.sleep(SRUN_SETTLES_S)
            batch = lab.job(job).batch_host
            ranks = [pid for node, pids in lab.task_pids(job, 0).items() if node != batch for pid in pids]

            lab.kill_node(batch)
            time.sleep(WORD_TRAVELS_S)

            assert not lab.pids_on(batch)
            assert [pid for pid in ranks if processes.alive(pid)] == ranks
            lab.start_node(batch)
            lab.cancel(job)
            lab.wait_ended(job, 240)  # Slurm may tell the node of it a minute later
