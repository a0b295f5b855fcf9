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
from collections import deque
from enum import StrEnum
from typing import NamedTuple

import msgspec

from stepkeeper.run_analytics.model import Use

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
    detect_s: float = 1.0  # until a fault or a dead rank is reported
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


# What came of one simulated run.


class Result(msgspec.Struct, kw_only=True):
    """What came of one simulated run.  Seconds of the clock."""

    wall_s: float = 0.0
    steps_s: float = 0.0  # that all steps which count would take with all nodes
    held_node_s: float = 0.0  # seconds that nodes were held, in sum
    spent: dict[Use, float] = msgspec.field(default_factory=lambda: dict.fromkeys(Use, 0.0))
    happened: dict[Kind, int] = msgspec.field(default_factory=lambda: dict.fromkeys(Kind, 0))
    hits: int = 0  # failures that ended a launch, or kept one from its first step
    launches: int = 0
    attempts: int = 0
    persons: int = 0  # times that the run stopped, and a person was needed
    saves: int = 0
    stopped_for: list[str] = msgspec.field(default_factory=list)

    @property
    def ettr(self) -> float:
        """Productive time over all time; see `run_analytics.model.Accounts.ettr`."""
        return self.spent[Use.PRODUCTIVE] / self.wall_s

    @property
    def speed(self) -> float:
        """Steps, as a share of those that all nodes would have done in all the time; without `nodes_min` the ETTR."""
        return self.steps_s / self.wall_s

    @property
    def restart_s(self) -> float:
        """Mean time from a failure to the next first step, the first start left out."""
        away = sum(self.spent[use] for use in (Use.HUNG, Use.STOPPING, Use.STARTING, Use.QUEUE))
        first = away / (self.launches or 1) if not self.hits else 0.0
        return (away - first) / self.hits if self.hits else 0.0


# Where the time and the nodes of a simulated run go.


class Accounts:
    """Of one run; every second of the clock is in one use, every node-hour held or not."""

    def __init__(self, result: Result, world: World, named: int) -> None:
        """Begin at 0; `named` is how many names the nodes of a launch have."""
        self._result, self._world, self._named = result, world, named
        self.use = Use.STARTING
        self._since = 0.0
        self._held_since = 0.0

    def spend(self, now: float, use: Use) -> None:
        """From now on time goes into this."""
        self._result.spent[self.use] += now - self._since
        self.use, self._since = use, now

    def lost(self, seconds: float) -> None:
        """So much of what seemed productive has to be done again."""
        self._result.spent[Use.PRODUCTIVE] -= seconds
        self._result.spent[Use.LOST] += seconds

    def held(self, now: float, names: int) -> None:
        """Nodes of so many names were held up to now."""
        nodes = self._world.nodes * min(1.0, names / self._named) + max(0, names - self._named)
        self._result.held_node_s += nodes * (now - self._held_since)
        self._held_since = now


# What a simulated training has done, and what of it would outlive a failure.

DURABLE_KEPT = 10


class Done(NamedTuple):
    """An amount of training."""

    steps_s: float = 0.0  # seconds that a launch with all nodes needs for it; its step takes one
    clock_s: float = 0.0  # that went by


class Progress:
    """Of one run, over all its launches."""

    def __init__(self) -> None:
        """Nothing is done."""
        self.done = Done()
        self._since: float | None = None  # the clock, while it steps
        self._speed = 1.0  # of the launch; 1 with all nodes
        self._snapshots: deque[Done] = deque()  # of the saves in flight, oldest first
        self._durable = [Done()]

    @property
    def stepping(self) -> bool:
        """Whether training goes on."""
        return self._since is not None

    @property
    def saving(self) -> bool:
        """Whether a save is in flight."""
        return bool(self._snapshots)

    @property
    def newest(self) -> int:
        """The step of the newest step directory; 0 where there is none."""
        return int(self._durable[-1].steps_s)

    def go_on(self, now: float, speed: float) -> None:
        """Step from now on."""
        self._since, self._speed = now, speed

    def pause(self, now: float) -> None:
        """Step no longer; takes in what was done up to now."""
        if self._since is not None:
            seconds = now - self._since
            self.done = Done(self.done.steps_s + self._speed * seconds, self.done.clock_s + seconds)
            self._since = None

    def note(self, now: float) -> None:
        """Take in what was done up to now, and go on."""
        if self._since is not None:
            self.pause(now)
            self._since = now

    def snapshot(self) -> int:
        """Begin a save of what is done; return its step."""
        self._snapshots.append(self.done)
        return int(self.done.steps_s)

    def commit(self) -> int | None:
        """Make the oldest save in flight durable; return its step, None where none is in flight any more."""
        if not self._snapshots:
            return None
        done = self._snapshots.popleft()
        self._durable = [*self._durable[1 - DURABLE_KEPT :], done]
        return int(done.steps_s)

    def lose(self) -> float:
        """Go back to the newest step directory; return the seconds of the clock that are lost by it."""
        self._snapshots.clear()
        lost = self.done.clock_s - self._durable[-1].clock_s
        self.done = self._durable[-1]
        return lost

    def roll_back(self) -> float:
        """Go back one step directory, where there is one; return the seconds of the clock that are lost by it."""
        if len(self._durable) > 1:
            self._durable.pop()
        return self.lose()
