"""What Slurm says of our job, unasked and when it is asked.  Pure."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from stepkeeper.core.events.nodes import Stamped


class JobState(StrEnum):
    """The states of a Slurm job that decisions depend on."""

    PENDING = "pending"
    RUNNING = "running"
    COMPLETING = "completing"
    ENDED = "ended"
    OTHER = "other"


class JobFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What Slurm says of our job, in our words.  Instants are Unix seconds."""

    state: JobState
    slurm_state: str  # as Slurm prints it, for people
    restarts: int
    reason: str = ""
    preempt_at: float | None = None
    end_at: float | None = None
    requeue_allowed: bool = True
    batch: bool = True  # it has a batch script; else nothing of it can be started again
    excluded: str = ""  # node list: where the job may not run
    required: str = ""  # node list: that the job wants by name


class SignalReceived(Stamped, frozen=True, kw_only=True, tag="signal_received"):
    """The batch process (we) got a signal: TERM, INT, USR1 or USR2."""

    signal: str


class NodeSignaled(Stamped, frozen=True, kw_only=True, tag="node_signaled"):
    """A watcher got SIGTERM: at a preemption, Slurm signals the steps long before the batch process."""

    node: str
    signal: str


class SlurmAnswered(Stamped, frozen=True, kw_only=True, tag="slurm_answered"):
    """The answer to `AskSlurm`; `job` is None when Slurm could not be asked, and `error` says why."""

    job: JobFacts | None = None
    error: str = ""


class RequeueAnswered(Stamped, frozen=True, kw_only=True, tag="requeue_answered"):
    """The answer to `Requeue`."""

    ok: bool
    error: str = ""  # where it is ok: what did not succeed besides
    job_id: int | None = None  # of the job that was submitted in its place
    forbidden: bool = False  # the site does not allow it: to try again is of no use


class NodesReleased(Stamped, frozen=True, kw_only=True, tag="nodes_released"):
    """The answer to `ReleaseNodes`."""

    ok: bool
    error: str = ""


class IdleNodes(Stamped, frozen=True, kw_only=True, tag="idle_nodes"):
    """The answer to `AskIdleNodes`: nodes like ours that nobody uses."""

    nodes: tuple[str, ...] = ()
    error: str = ""  # Slurm could not be asked
