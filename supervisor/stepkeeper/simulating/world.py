"""What a simulated cluster is like: how often it fails, and how long everything takes.

The failures are those of published runs, infrastructure and software alike:

    Llama 3 405B    419 unplanned interruptions of 2,048 nodes in 54 days: 3.8 in 1,000 node-days
                    (arXiv 2407.21783, section 3.3.4).  By its table 5: 283 faults of a node's hardware (GPU, memory,
                    network adapter, disk, power, ...), 32 hosts taken away, 104 that the nodes survived (software,
                    network, NCCL time-outs, silent corruption)
    Meta RSC-1      6.5 in 1,000 node-days; RSC-2 2.3 (arXiv 2410.21680)
"""

from __future__ import annotations

import math
from enum import StrEnum

import msgspec

PRESETS = {"llama3": 1000 * 419 / (2048 * 54), "rsc1": 6.5, "rsc2": 2.3}  # in 1,000 node-days


class Kind(StrEnum):
    """What befalls a run."""

    FAULT = "node fault"  # hardware: the agent sees it, and the node is left
    LOST = "node lost"  # nobody there answers any more
    FAILURE = "failure"  # a rank ends, and the nodes are fine
    PREEMPTION = "preemption"
    TIME_LIMIT = "time limit"


MIX = {Kind.FAULT: 283 / 419, Kind.LOST: 32 / 419, Kind.FAILURE: 104 / 419}


class World(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of a cluster, a training and a way to save.  Seconds unless the name says otherwise."""

    nodes: int = 2048  # that a launch uses
    spares: int = 0  # held besides
    nodes_min: int = 0  # that a launch may shrink to where no spare is left; 0: never
    days: float = 54.0
    failures: float = PRESETS["llama3"]  # in 1,000 node-days
    preemptions_per_day: float = 0.0
    time_limit_s: float = math.inf

    interval_s: float = 1800.0  # of training between two saves
    blocked_s: float = 5.0  # that a save takes from training
    persist_s: float = 60.0  # from its request to durable

    bus_s: float = 3.0  # until watchers answer
    verify_s: float = 20.0  # choosing and reading back a checkpoint
    clear_s: float = 1.0
    load_s: float = 120.0  # from the start of the processes to the first step
    stop_s: float = 3.0  # from SIGKILL to the end of the Slurm step
    judge_s: float = 2.0  # why a launch failed
    detect_s: float = 1.0  # until a fault or a dead rank is heard of
    silence_s: float = 12.0  # until a lost node's watcher is missed
    slurm_s: float = 0.3  # an answer of Slurm
    queue_s: float = 600.0  # mean wait after a requeue
    grace_s: float = 120.0  # of a preemption
    limit_notice_s: float = 600.0  # the user signal before the time limit
    repair_s: float = 4 * 3600.0  # mean, until a node that was given back, or another one like it, is idle
    person_s: float = 4 * 3600.0  # until somebody submits a run again that has stopped

    @property
    def mtbf_s(self) -> float:
        """Mean time between failures of the nodes that a launch uses."""
        return 86_400.0 * 1000.0 / (self.failures * self.nodes) if self.failures else math.inf

    def problem(self) -> str | None:
        """Say which figure makes no sense; None where all do."""
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if math.isnan(value) or value < 0:
                return f"{name} is {value:g}: it must be 0 or more"
        if not (self.nodes >= 1 and 0 < self.days < math.inf and self.interval_s > 0):
            return "nodes, days and the interval between saves must be more than 0"
        if self.nodes_min > self.nodes:
            return f"a launch has {self.nodes} nodes: it cannot shrink to {self.nodes_min}"
        if self.interval_s + self.blocked_s < self.persist_s:
            return (
                f"a save takes {self.persist_s:g} s to be durable, so one can begin no sooner: "
                f"an interval of {self.interval_s:g} s is too short"
            )
        return None
