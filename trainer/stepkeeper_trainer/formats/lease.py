"""`lease.json`: which attempt of a run may act.

Two attempts can run at once (slurmd dies on the batch node, Slurm requeues, and slurmd comes back with
the old processes alive).  The higher epoch (job id, restart count) wins.  There is no flock: shared file
systems do not agree on it.  Both sides read the file before each act that the other must not repeat.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from stepkeeper_trainer.formats.durable import write_atomically
from stepkeeper_trainer.formats.processes import Birth
from stepkeeper_trainer.formats.records import read_record

if TYPE_CHECKING:
    from pathlib import Path

FORMAT = 1
LEASE_NAME = "lease.json"
NO_JOB = 0  # the number of no Slurm job: the run was started by hand


class Lease(msgspec.Struct, frozen=True, kw_only=True):
    """Who holds a run directory."""

    format: int = FORMAT
    job_id: int
    restart_count: int
    attempt: int
    node: str
    pid: int
    taken_at: float  # Unix seconds
    birth: Birth | None = None  # of that process; None in leases of 0.1

    @property
    def epoch(self) -> tuple[int, int]:
        """What is compared: the higher one wins."""
        return (self.job_id, self.restart_count)


class LeaseError(ValueError):
    """The lease file does not parse, or a newer Stepkeeper wrote it."""


_decoder = msgspec.json.Decoder(Lease)


def read(run_directory: Path) -> Lease | None:
    """Return the lease of a run directory; None where nobody ever took it.

    Raises:
        LeaseError: the file is there and is no lease, or one of a newer format.
        OSError: it cannot be read.
    """
    return read_record(
        run_directory / LEASE_NAME,
        _decoder,
        newest=FORMAT,
        error=LeaseError,
        otherwise="not a lease",
        remedy="; if no job uses this run, remove the file",
    )


def write(run_directory: Path, lease: Lease) -> None:
    """Take the lease: the caller has compared epochs.  Raises OSError."""
    write_atomically(run_directory / LEASE_NAME, msgspec.json.encode(lease), mode=0o644)
