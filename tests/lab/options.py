"""What a test may choose about its lab: one frozen record, with production's defaults where speed allows."""

from dataclasses import dataclass
from typing import Literal

USERS = ("games", "news")
"""Ordinary accounts that every Debian and Ubuntu has: no account is created on the machine.

Their login shell is nologin, which Slurm never runs: it starts the batch script itself.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class LabOptions:
    """One field a choice; the names are those of slurm.conf where there is one."""

    slurm: Literal["installed", "newest"] = "installed"
    """Which Slurm: this machine's own, or the one of `newest.py`."""
    nodes: int = 4
    gpus: int = 2
    """Fake GPUs a node: null devices that Slurm hands out by CUDA_VISIBLE_DEVICES."""
    cpus: int = 8
    """CPUs that a node claims to have, whatever the machine has."""
    memory_mib: int = 64_000

    grace_time_s: int = 20
    """GraceTime of the partition `train`: from the preemption decision to the end."""
    kill_wait_s: int = 10
    """KillWait: from SIGTERM to SIGKILL.  Production's default is 30."""
    send_user_signal: bool = False
    """preempt_send_user_signal: `--signal=B:USR1@N` is sent at the preemption decision, to the batch process."""
    job_requeue: bool = True
    """JobRequeue: False is a site where nothing is requeued, not even by its owner."""
    backup_controller: bool = False
    """A second slurmctld that takes over when the first one is gone; both keep their state in one directory."""
    cred_expire_s: int | None = 5
    """Lifetime of a job credential, which a requeued job waits for.  None: production's 120 s."""
    slurmd_timeout_s: int = 300
    """After this silence a node is DOWN.  Tests of node loss set about 5."""
    inactive_limit_s: int = 0
    switches: tuple[int, ...] = ()
    """Nodes of each leaf switch, in order, below one top switch: topology/tree.  Empty: no topology."""
    slurm_conf: tuple[str, ...] = ()
    """More lines for slurm.conf.  The last line for a key counts."""
    linuxproc: bool = False
    """Use proctrack/linuxproc although the freezer is there, as on a machine without it."""
