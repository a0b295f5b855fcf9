"""What the node agent asks of Slurm: nodes, drains, and a requeued job's eligibility.  Needs root or SlurmUser."""

from __future__ import annotations

import re
from typing import Protocol

import msgspec

REASON_PREFIX = "stepkeeper:"
_GPUS = re.compile(r"(?:^|,)gpu(:[^,:(]+)?:(\d+)")
_MIG = re.compile(r"\dg\.\d+gb")


class NodeFacts(msgspec.Struct, frozen=True, kw_only=True):
    """One node as Slurm sees it."""

    name: str
    states: frozenset[str]  # upper case, without flags' decoration: {"IDLE", "DRAIN"}, {"DOWN"}, ...
    reason: str = ""
    reason_at: float | None = None  # Unix seconds
    partitions: tuple[str, ...] = ()
    gres: str = ""  # what Slurm counts here, such as `gpu:h100:8(S:0-1)`
    host: str = ""  # NodeHostName
    address: str = ""  # NodeAddr: a name or an IP address

    @property
    def drained(self) -> bool:
        """Whether no new job is put here."""
        return bool(self.states & {"DRAIN", "DRAINED", "DRAINING"})

    @property
    def ours(self) -> bool:
        """Whether the reason is Stepkeeper's."""
        return self.reason.startswith(REASON_PREFIX)

    @property
    def gpus(self) -> int:
        """Return how many GPUs `gres` names, without slices of MIG: one GPU has up to seven.

        >>> NodeFacts(name="n", states=frozenset(), gres="gpu:h100:8(S:0-1),gpu:a100_1g.5gb:7,shard:32").gpus
        8
        """
        whole = re.sub(r"\([^)]*\)", "", self.gres)
        return sum(int(count) for kind, count in _GPUS.findall(whole) if not _MIG.search(kind))


class JobsHere(msgspec.Struct, frozen=True, kw_only=True):
    """Who is on a node now, as the node itself says."""

    jobs: tuple[int, ...] = ()
    uids: tuple[int, ...] = ()  # the jobs' owners; empty where the owner of any of them is not known


class OwnedJob(msgspec.Struct, frozen=True, kw_only=True):
    """What decides whether a caller may have a job expedited."""

    job_id: int
    uid: int
    state: str  # as Slurm prints it: PENDING, COMPLETING, RUNNING, ...
    restarts: int
    nodes: tuple[str, ...] = ()  # now; empty while it is pending
    exclude: str = ""  # ExcNodeList
    eligible_at: float | None = None
    held: bool = False  # by a person, or requeued in held state
    reason: str = ""  # why it waits or failed, as Slurm prints it: Resources, JobLaunchFailure, ...
    exit_code: str = ""  # of an attempt that is over, as Slurm prints it: 1:0
    ran_s: float | None = None  # how long an attempt that is over ran
    task: str = ""  # `12_3`: an array's last task has the array's own job id, which stands for all its tasks

    @property
    def address(self) -> str:
        """Return the arguments of Slurm's commands that name this job and no other."""
        return self.task or str(self.job_id)


class NodeClient(Protocol):
    """Each method raises `SlurmError`, and returns within its time limit."""

    def node(self, name: str) -> NodeFacts:
        """Return one node, at a small cost for the controller: 0.3 ms, whatever the size of the cluster."""
        ...

    def peers(self, name: str) -> tuple[NodeFacts, ...]:
        """Return every node that shares a partition with this one, itself included: for the circuit breaker.

        Slurm cannot be asked for counts, or for a part of the nodes: it packs all of them, 7 microseconds each.
        """
        ...

    def cluster_size(self) -> int:
        """Return about how many nodes there are, never too few, at a small cost for the controller."""
        ...

    def drain(self, name: str, reason: str) -> None:
        """Set the state DRAIN with a reason."""
        ...

    def resume(self, name: str) -> None:
        """Return a node to service."""
        ...

    def reboot(self, name: str, reason: str) -> None:
        """Have Slurm reboot the node as soon as its jobs are gone, and return it to service afterwards."""
        ...

    def owned_job(self, job_id: int) -> OwnedJob:
        """Return whose job it is and where it runs."""
        ...

    def expedite(self, job: OwnedJob, exclude: str | None, after_s: int) -> None:
        """Set StartTime of a pending job and, unless it is None, ExcNodeList, in one call."""
        ...

    def requeue(self, job: OwnedJob) -> None:
        """Requeue a job whose expedited attempt Slurm failed before it began."""
        ...
