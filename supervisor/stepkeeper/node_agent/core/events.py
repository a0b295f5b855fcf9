"""What `decide` gets and gives: events, which each say when (Unix seconds), and effects."""

from __future__ import annotations

import msgspec

from stepkeeper.node_agent.core.state import Drain, Incident
from stepkeeper.node_agent.readings import Gpu, NvmlState
from stepkeeper.node_agent.xid.catalogue import Fault
from stepkeeper.slurm.client import NodeFacts


class _Event(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="event"):
    at: float


class Started(_Event, frozen=True, kw_only=True, tag="started"):
    """The agent runs, and has read its ledger: what is left to do from before is taken up."""


class FaultSeen(_Event, frozen=True, kw_only=True, tag="fault_seen"):
    """A sensor saw something, and `xid` judged it."""

    fault: Fault


class GpusListed(_Event, frozen=True, kw_only=True, tag="gpus_listed"):
    """NVML listed the GPUs."""

    gpus: tuple[Gpu, ...]
    driver: str = ""


class JobsListed(_Event, frozen=True, kw_only=True, tag="jobs_listed"):
    """Who was on the node when an incident began; empty where that is not known."""

    incident: str
    jobs: tuple[int, ...] = ()
    uids: tuple[int, ...] = ()  # the owners of all of them, or nothing
    error: str = ""


class NodesAnswered(_Event, frozen=True, kw_only=True, tag="nodes_answered"):
    """Slurm answered about the node, and unless it was asked `alone`, about those that share a partition with it."""

    call: int
    nodes: tuple[NodeFacts, ...] = ()
    alone: bool = False  # only our own node was asked for
    took_s: float = 0.0
    cluster_size: int = 0  # about so many nodes, never too few; 0: not known
    error: str = ""


class NvmlStands(_Event, frozen=True, kw_only=True, tag="nvml_stands"):
    """NVML reported its own state."""

    state: NvmlState


class GpusReset(_Event, frozen=True, kw_only=True, tag="gpus_reset"):
    """A GPU was seen to have been reset, or all of them by a new start of the driver."""

    why: str
    pci: str = ""  # empty: all


class Looked(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a look at the GPUs has shown, where NVML is there."""

    answers: bool = True  # False: NVML is stuck
    answering: tuple[str, ...] = ()  # PCI addresses of the GPUs that answer
    well: tuple[str, ...] = ()  # those of them that ask for nothing
    vouched: tuple[str, ...] = ()  # those of these whose recovery action NVML reports: none
    here: tuple[str, ...] = ()  # all that NVML or the kernel's list of devices knows


class CallAnswered(_Event, frozen=True, kw_only=True, tag="call_answered"):
    """A drain, resume, reboot, reset, look or the checks are over; an error says why it failed."""

    call: int
    error: str = ""
    looked: Looked | None = None  # of checks and looks; None: NVML is not there


class Tick(_Event, frozen=True, kw_only=True, tag="tick"):
    """`plan.due_at` has come."""


Event = Started | FaultSeen | GpusListed | NvmlStands | GpusReset | JobsListed | NodesAnswered | CallAnswered | Tick


# What to do: the only output besides the next state.  Effects with a `call` are answered, always, by `NodesAnswered` or
# `CallAnswered` with the same number.


class _Effect(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="effect"):
    pass


class Record(_Effect, frozen=True, kw_only=True, tag="record"):
    """Write an incident to the ledger: a later line of the same id replaces the earlier one."""

    incident: Incident


class RecordDrain(_Effect, frozen=True, kw_only=True, tag="record_drain"):
    """Write to the ledger which drain we hold; None: none any more."""

    drain: Drain | None


class Tell(_Effect, frozen=True, kw_only=True, tag="tell"):
    """Say an incident to the jobs on the node."""

    incident: Incident


class ListJobs(_Effect, frozen=True, kw_only=True, tag="list_jobs"):
    """Ask this node itself which jobs run on it; no call to the controller."""

    incident: str


class AskNodes(_Effect, frozen=True, kw_only=True, tag="ask_nodes"):
    """Ask Slurm about the node and its peers, in one call."""

    call: int
    alone: bool = False  # about the node only: Slurm answers that without packing all nodes
    crowded_s: float = 0.0  # where that takes so long, the size of the cluster is wanted too


class SetDrain(_Effect, frozen=True, kw_only=True, tag="set_drain"):
    """Drain our node."""

    call: int
    reason: str


class Resume(_Effect, frozen=True, kw_only=True, tag="resume"):
    """Return our node to service."""

    call: int


class Reboot(_Effect, frozen=True, kw_only=True, tag="reboot"):
    """Have Slurm reboot our node."""

    call: int
    reason: str


class ResetGpus(_Effect, frozen=True, kw_only=True, tag="reset_gpus"):
    """Reset GPUs that nobody uses."""

    call: int
    pcis: tuple[str, ...]


class CheckNode(_Effect, frozen=True, kw_only=True, tag="check_node"):
    """Look whether the node is fit for jobs."""

    call: int


class Alarm(_Effect, frozen=True, kw_only=True, tag="alarm"):
    """Say loudly what a person has to know."""

    text: str
    incident: str = ""


Effect = Record | RecordDrain | Tell | ListJobs | AskNodes | SetDrain | Resume | Reboot | ResetGpus | CheckNode | Alarm
