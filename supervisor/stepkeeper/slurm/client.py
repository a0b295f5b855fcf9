"""What Stepkeeper asks of Slurm: as small as its use.  Every call has a time limit."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Protocol

import msgspec

from stepkeeper.core.events import JobFacts

_FORBIDDEN = ("presently disabled", "permission denied", "not permitted", "invalid user id")


class SlurmError(Exception):
    """A call failed: `unreachable` if the controller did not answer, else Slurm refused it."""

    def __init__(self, message: str, *, unreachable: bool = False) -> None:
        super().__init__(message)
        self.unreachable = unreachable

    @property
    def forbidden(self) -> bool:
        """Whether the site does not let us do this: to try it again is of no use."""
        said = str(self).lower()
        return not self.unreachable and any(words in said for words in _FORBIDDEN)

    @property
    def forgotten(self) -> bool:
        """Whether Slurm knows no such job, or none any more."""
        return not self.unreachable and "invalid job id" in str(self).lower()


def is_unconfigured(error: str) -> bool:
    """Tell whether Slurm's commands found neither a slurm.conf nor a server that has one."""
    said = error.lower()
    return "could not establish a configuration source" in said or "unable to process configuration file" in said


class Resubmitted(msgspec.Struct, frozen=True, kw_only=True):
    """A job that goes on with the run of another one, which Slurm may not requeue."""

    job_id: int
    found: bool = False  # it was there: submitted by somebody who was ended before he could say so
    unknown: tuple[str, ...] = ()  # in what it may differ from the job before


class ClusterSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of a cluster that deadlines depend on."""

    kill_wait_s: float
    version: str


class SlurmClient(Protocol):
    """Each method raises `SlurmError`, and returns within its time limit.

    A job is named as Slurm's commands want it: its id, or `ARRAY_TASK` for one task of an array, whose own id may be
    the id of the whole array.
    """

    def job(self, job: str) -> JobFacts:
        """Return the facts of a job."""
        ...

    def job_runs(self, job: str) -> bool:
        """Tell whether a job holds nodes; a job that Slurm has forgotten does not."""
        ...

    def settings(self) -> ClusterSettings:
        """Return the cluster's settings."""
        ...

    def hostnames(self, node_list: str) -> tuple[str, ...]:
        """Expand a node list such as `gpu[1-3]`, in Slurm's order."""
        ...

    def requeue(self, job: str) -> None:
        """Requeue a job of our own."""
        ...

    def resubmit(
        self, job: str, run_directory: str, nodes: int, words: Sequence[str] = (), exclude: Sequence[str] = ()
    ) -> Resubmitted:
        """Submit a job of our own again, to start after its end and to go on with its run; once, however often asked.

        Args:
            job: Ours: what cannot be read off the job is taken from our environment.
            run_directory: Absolute.
            nodes: That the job was submitted with; some may have been given back since.
            words: Our own command line: it may show the batch script's arguments exactly.
            exclude: Nodes on which the new job may not run.
        """
        ...

    def exclude(self, job: str, nodes: Sequence[str]) -> None:
        """Replace the list of nodes on which a job that does not run may not run."""
        ...

    def usable_nodes(self, job: str, like: Sequence[str] = ()) -> tuple[str, ...]:
        """Return the nodes of a job's partitions that are neither down nor drained, busy ones too.

        With `like`, nodes of the job: only those that are made as well as one of these, so that the job fits there.
        """
        ...

    def idle_nodes(self, job: str, like: Sequence[str]) -> tuple[str, ...]:
        """Return the idle nodes of a job's partitions that it does not exclude and that are made as some of its own."""
        ...

    def keep(self, job: str, nodes: Sequence[str]) -> None:
        """Give back all nodes of a running job but these."""
        ...

    def comment(self, job: str, text: str) -> None:
        """Set the comment of a job of our own, which everybody can read."""
        ...

    def cancel(self, job: str) -> None:
        """Cancel a job of our own."""
        ...


# What the node agent asks of Slurm: nodes, drains, and a requeued job's eligibility.  Needs root or SlurmUser.

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
