"""Who holds a run directory where neither Slurm nor a supervisor counts attempts: the newest start.

On one node a living holder is refused outright.  On another it cannot be seen: the newer start takes over, and the
older one commits nothing from then on.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

from stepkeeper_trainer.errors import RunDirectoryError
from stepkeeper_trainer.formats import lease as leases
from stepkeeper_trainer.formats import processes
from stepkeeper_trainer.log import warn

if TYPE_CHECKING:
    from stepkeeper_trainer.formats.lease import Lease

NO_JOB = leases.NO_JOB
_CLOCK_SLACK_S = 2.0


def next_epoch(run_directory: Path, node: str) -> tuple[int, int] | None:
    """Return the epoch of a start by hand; None where a Slurm job held the run last: its attempts are not counted on.

    Raises:
        RunDirectoryError: a process that lives trains in it.
        OSError: the lease cannot be read.
    """
    try:
        held = leases.read(run_directory)
    except leases.LeaseError as error:
        warn("lease_unreadable", why=error)
        return NO_JOB, 0
    if held is None:
        return NO_JOB, 0
    if held.job_id != NO_JOB:
        warn("run_directory_of_a_job", job=held.job_id, why="two trainings must not share it: is that job over?")
        return None
    _refuse(run_directory, held, node)
    return NO_JOB, held.restart_count + 1


def refuse_holder(run_directory: Path, node: str) -> None:
    """Refuse a run directory in which a process of this node trains.

    Raises:
        RunDirectoryError: it lives.
        OSError: the lease cannot be read.
    """
    with contextlib.suppress(leases.LeaseError):  # said where the lease is taken
        if (held := leases.read(run_directory)) is not None:
            _refuse(run_directory, held, node)


def _refuse(run_directory: Path, held: Lease, node: str) -> None:
    if held.node == node and held.pid != os.getpid() and lives(held):
        raise RunDirectoryError(
            f"{run_directory}: process {held.pid} on {node} trains in it: "
            "wait for its end, stop it, or choose another run directory"
        )


def lives(held: Lease) -> bool:
    """Tell whether the process that took a lease on this node is still there, and not another one of its number.

    Raises:
        OSError: the kernel does not tell.
    """
    found = processes.birth(held.pid)
    if found is None:
        return False
    return _began_before(found, held.taken_at) if held.birth is None else found.is_that_of(held.birth)


def _began_before(found: processes.Birth, instant: float) -> bool:
    """Tell whether a process is older than a lease of 0.1, which has no birth: by a clock that may have been set."""
    uptime_s = float(Path("/proc/uptime").read_text(encoding="ascii").split()[0])
    age_s = uptime_s - found.ticks / os.sysconf("SC_CLK_TCK")
    return time.time() - age_s <= instant + _CLOCK_SLACK_S
