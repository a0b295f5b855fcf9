"""What happened, as the agent's `decide` gets it.  Each says when: Unix seconds."""

from __future__ import annotations

import msgspec

from stepkeeper.node_agent.sensors.readings import Gpu, NvmlState
from stepkeeper.node_agent.xid.catalogue import Fault
from stepkeeper.slurm.nodes import NodeFacts


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
