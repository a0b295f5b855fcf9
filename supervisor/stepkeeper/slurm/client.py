"""What Stepkeeper asks of Slurm: as small as its use.  Every call has a time limit."""

from __future__ import annotations

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
