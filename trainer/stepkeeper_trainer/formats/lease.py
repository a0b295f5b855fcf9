"""`lease.json`: which attempt of a run may act, and by which process.

Two attempts can run at once (slurmd dies on the batch node, Slurm requeues, and slurmd comes back with
the old processes alive).  The higher epoch (job id, restart count) wins.  There is no flock: shared file
systems do not agree on it.  Both sides read the file before each act that the other must not repeat.

A process is known by the kernel's own numbers, whatever a clock says.  Its number is given to another one after its
end, and a wall clock may be set between two readings.  What stays is when the kernel started the process, counted from
the machine's boot, and which boot that was.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from stepkeeper_trainer.formats.records import FORMAT, RecordFile

PROC = Path("/proc")
_BOOT = "sys/kernel/random/boot_id"
_STATE, _STARTED = 0, 19  # in /proc/PID/stat, counted behind the name
_TICK_NS = 10**9 // os.sysconf("SC_CLK_TCK")
_ROUNDING = 1  # ticks: a time namespace may move instants by a part of one


class Birth(msgspec.Struct, frozen=True):
    """When a process began: no other process of its number on that machine shares it."""

    boot: str  # the kernel's name of this boot; empty where a container hides it
    ticks: int  # of the kernel, from that boot to the start of the process, whatever time namespace reads them

    def is_that_of(self, other: Birth) -> bool:
        """Tell whether these are the births of one process, where its number was found again."""
        another_boot = self.boot and other.boot and self.boot != other.boot
        return not another_boot and abs(self.ticks - other.ticks) <= _ROUNDING


def birth(pid: int, *, proc: Path = PROC) -> Birth | None:
    """Return when a process began; None where none of that number lives (one that nobody buried is dead).

    Raises:
        OSError: the kernel's answer cannot be read.
    """
    try:
        stat = (proc / str(pid) / "stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = stat.rpartition(b")")[2].split()
    if fields[_STATE] in {b"Z", b"X"}:
        return None
    return Birth(_boot(proc), int(fields[_STARTED]) - _moved_by(proc))


def _boot(proc: Path) -> str:
    try:
        return (proc / _BOOT).read_text(encoding="ascii").strip()
    except (FileNotFoundError, PermissionError):  # a container's own /proc
        return ""


def _moved_by(proc: Path) -> int:
    """Return how many ticks this process's time namespace adds to what it reads; 0 on kernels without them."""
    try:
        lines = (proc / "self/timens_offsets").read_text(encoding="ascii").splitlines()
    except FileNotFoundError:
        return 0
    for line in lines:
        clock, seconds, nanoseconds = line.split()
        if clock in {"boottime", "7"}:
            return (int(seconds) * 10**9 + int(nanoseconds)) // _TICK_NS
    return 0


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


_lease = RecordFile(LEASE_NAME, Lease, "not a lease", "; if no job uses this run, remove the file", LeaseError)
read = _lease.read
write = _lease.write  # the caller has compared epochs
