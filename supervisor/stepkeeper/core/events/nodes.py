"""What is reported of the nodes: their watchers, their checks, their hardware.  Pure."""

from __future__ import annotations

import msgspec

from stepkeeper.core.reasons import Why

# What all events have.


class Stamped(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="event"):
    """Something that happened; its source says when, in Unix seconds that never go backwards."""

    at: float


class Exclusion(msgspec.Struct, frozen=True, kw_only=True):
    """A node on which this job shall not run, and until when (Unix seconds)."""

    node: str
    reasons: Why = ()
    until: float


class Unfit(msgspec.Struct, frozen=True, kw_only=True):
    """A node on which no launch should start, and why."""

    node: str
    why: str
    shared: bool = False  # the cause may be common to all nodes: storage, clock


class WatcherReady(Stamped, frozen=True, kw_only=True, tag="watcher_ready"):
    """The watcher of a node answers."""

    node: str
    bus: int
    switches: str = ""  # above the node, the highest first: `core.leaf3`; empty where Slurm knows none


class WatcherLost(Stamped, frozen=True, kw_only=True, tag="watcher_lost"):
    """A watcher fell silent or its process ended."""

    node: str
    bus: int
    why: str


class SlurmdGone(Stamped, frozen=True, kw_only=True, tag="slurmd_gone"):
    """A node's watcher is late, and the node refuses connections to slurmd, for seconds: nothing of Slurm runs there.

    Slurmd of another node takes them.  Told again every few seconds while it is so.
    """

    node: str
    bus: int
    silent_s: float  # of the watcher


class BusEnded(Stamped, frozen=True, kw_only=True, tag="bus_ended"):
    """The Slurm step of the watchers is over."""

    bus: int
    code: int
    error: str = ""


class NodesCleared(Stamped, frozen=True, kw_only=True, tag="nodes_cleared"):
    """Every watcher confirms: no process of an earlier launch is left on its node."""

    launch: int
    address: str  # of the node of rank 0: where the ranks of the next launch meet
    port: int  # free there
    unfit: tuple[Unfit, ...] = ()  # nodes that failed the checks before a launch
    nodes: tuple[str, ...] = ()  # that confirmed


class NodesNotCleared(Stamped, frozen=True, kw_only=True, tag="nodes_not_cleared"):
    """The answer to `AskUncleared`: nodes that have not confirmed."""

    launch: int
    nodes: tuple[str, ...]


class NodeFaulted(Stamped, frozen=True, kw_only=True, tag="node_faulted"):
    """A fault of a node's hardware was seen; the same `incident` again means that it was raised."""

    node: str
    incident: str
    name: str  # `XID 79`
    action: str  # of `xid.catalogue.Action`
    leave: bool  # no job should run on this node any more
    why: str
    gpu: str = ""  # PCI address and UUID, for people
    drained: bool = False  # the agent has drained the node


class NodesChecked(Stamped, frozen=True, kw_only=True, tag="nodes_checked"):
    """The answer to `CheckNodes`: of the nodes that answered, those that are still not fit."""

    nodes: tuple[str, ...]  # that answered
    unfit: tuple[Unfit, ...] = ()
