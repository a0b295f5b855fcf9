"""What happened, as the agent's `decide` hears it.  Each says when: Unix seconds."""

from __future__ import annotations

import msgspec

from stepkeeper.node.sensors.readings import Gpu
from stepkeeper.node.xid.model import Fault
from stepkeeper.slurm.nodes import NodeFacts


class _Event(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="event"):
    at: float


class Started(_Event, frozen=True, kw_only=True, tag="started"):
    """The agent runs, and has read its ledger: what is left to do from before is taken up."""


class FaultSeen(_Event, frozen=True, kw_only=True, tag="fault_seen"):
    """A sensor saw something, and `xid` judged it."""

    fault: Fault


class GpusListed(_Event, frozen=True, kw_only=True, tag="gpus_listed"):
    """NVML told which GPUs there are."""

    gpus: tuple[Gpu, ...]
    driver: str = ""


class JobsListed(_Event, frozen=True, kw_only=True, tag="jobs_listed"):
    """Who was on the node when an incident began; empty where that could not be told."""

    incident: str
    jobs: tuple[int, ...] = ()
    uids: tuple[int, ...] = ()  # the owners of all of them, or nothing
    error: str = ""


class NodesAnswered(_Event, frozen=True, kw_only=True, tag="nodes_answered"):
    """Slurm told about the node, and unless it was asked `alone`, about those that share a partition with it."""

    call: int
    nodes: tuple[NodeFacts, ...] = ()
    alone: bool = False  # only our own node was asked for
    took_s: float = 0.0
    error: str = ""


class CallAnswered(_Event, frozen=True, kw_only=True, tag="call_answered"):
    """A drain, resume, reboot, reset or the checks are over; an error says why it was in vain."""

    call: int
    error: str = ""


class Tick(_Event, frozen=True, kw_only=True, tag="tick"):
    """`plan.due_at` has come."""


Event = Started | FaultSeen | GpusListed | JobsListed | NodesAnswered | CallAnswered | Tick
