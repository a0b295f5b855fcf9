"""A real Slurm cluster of some nodes on this one machine, in a directory of its own.

    with Lab(LabOptions(nodes=4, grace_time_s=20)) as lab:
        job = lab.submit("sleep 60", sbatch_args=["-N2"], user="games")
        lab.wait_job(job, "RUNNING")
        urgent = lab.preempt(job)

By hand: `python -m tests.lab up`, then `shell`, `status`, `down`.
"""

from tests.lab.cluster import Lab
from tests.lab.facts import JobFacts, NodeFacts
from tests.lab.faults import LabError, LabTimeoutError
from tests.lab.options import USERS, LabOptions

__all__ = ["USERS", "JobFacts", "Lab", "LabError", "LabOptions", "LabTimeoutError", "NodeFacts"]
