"""What the journal tells of each node of the newest attempt, and of the ranks there.  Pure.

The journal names ranks where they matter: those that ended, and the slowest of a node.  The others follow from the
order of the launch's nodes and the number of ranks on each, unless a rank that is named contradicts that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from enum import StrEnum

import msgspec

from stepkeeper.core import effects as do
from stepkeeper.core import events as on
from stepkeeper.run_store.journal import Record, epoch_of

ENDED_RANKS_MAX = 8  # of a node that are named; the others are counted


class NodeState(StrEnum):
    """What a node does now.  The first that holds counts."""

    LEFT = "left"
    UNFIT = "not fit"
    LOST_WATCHER = "no watcher"
    RANKS_ENDED = "ranks ended"
    SLOW = "slow"
    IN_USE = "in use"
    SPARE = "spare"


class Node(msgspec.Struct, kw_only=True):
    """One node of the attempt."""

    name: str
    state: NodeState = NodeState.IN_USE
    why: str = ""
    step_seconds: float | None = None  # of its own work for a step, without waiting for others
    slowest_rank: int | None = None
    ended: dict[int, str] = {}  # rank -> how it ended, of the newest launch
    ranks: tuple[int, int] | None = None  # the first and the last of the newest launch; None where that is not known
    running: int = 0  # of them; 0 too where they are not known


class Nodes:
    """Takes the records of a journal, oldest first; an attempt that begins starts it anew."""

    def __init__(self) -> None:
        self._epoch: tuple[int, int] | None = None
        self._begin()

    def _begin(self) -> None:
        self._names: dict[str, None] = {}  # of the attempt, in their order
        self._usable: frozenset[str] | None = None
        self._launch: tuple[str, ...] = ()  # the nodes of the newest launch, in the order of their ranks
        self._runs = False  # that launch has not ended
        self._each: int | None = None  # ranks of a node, as far as the journal says: one a GPU
        self._is_wrapped = True
        self._placed: dict[int, str] = {}  # rank -> its node, where the journal says it
        self._left: dict[str, str] = {}
        self._unfit: dict[str, str] = {}
        self._watcher_lost: dict[str, str] = {}
        self._slow: dict[str, float] = {}
        self._own: dict[str, float] = {}
        self._slowest: dict[str, int] = {}
        self._ended: dict[str, dict[int, str]] = {}

    def take(self, record: Record) -> None:
        """Take the next record.  The last words of a superseded attempt tell nothing of the newer one."""
        epoch = epoch_of(record)
        if self._epoch is not None and epoch < self._epoch:
            return
        if epoch != self._epoch:
            self._epoch = epoch
            self._begin()
        if isinstance(record.event, on.AttemptStarted):
            self._names = dict.fromkeys(record.event.nodes)
            self._each, self._is_wrapped = record.event.gpus_per_node, record.event.wrapped
        if record.nodes is not None:
            self._names.update(dict.fromkeys(record.nodes))
            self._usable = frozenset(record.nodes)
        self._hear(record.event)
        for effect in record.effects:
            if isinstance(effect, do.StartLaunch):
                self._launch = tuple(effect.nodes or record.nodes or self._names)
                self._runs, self._placed = True, {}
                self._ended, self._slow, self._own, self._slowest = {}, {}, {}, {}
            if isinstance(effect, do.ReportSlowNode) and not effect.loading:
                if effect.over:
                    self._slow.pop(effect.node, None)
                else:
                    self._slow[effect.node] = effect.factor

    def _hear(self, event: on.Event) -> None:
        match event:
            case on.NodeFaulted() if event.leave:
                self._left[event.node] = f"{event.name}: {event.why}"
            case on.NodesCleared() | on.NodesChecked():
                for node in event.nodes:
                    self._unfit.pop(node, None)
                self._unfit.update({each.node: each.why for each in event.unfit})
            case on.WatcherReady():
                self._watcher_lost.pop(event.node, None)
            case on.WatcherLost():
                self._watcher_lost[event.node] = event.why
            case on.RankExited():
                how = f"signal {event.signal}" if event.signal is not None else f"exit code {event.code}"
                self._ended.setdefault(event.node, {})[event.rank] = how
                self._placed[event.rank] = event.node
            case on.RankHello():
                self._placed[event.rank] = event.node
            case on.LaunchEnded():
                self._runs = False
            case on.NodesPaced():
                self._own = dict(event.own)
                self._slowest = {node: rank for node, rank, _ in event.slowest}
                self._placed.update({rank: node for node, rank, _ in event.slowest})
            case _:
                pass  # it says nothing of one node

    def listed(self, ranks_each: int | None = None) -> list[Node]:
        """Return the nodes: those that a person looks for first, then by name.

        Args:
            ranks_each: ranks of a node, where the settings say it.
        """
        order = list(NodeState)
        first = self._first_ranks(ranks_each or self._each)
        found = [self._node(name, first.get(name)) for name in self._names]
        return sorted(found, key=lambda each: (order.index(each.state), each.name))

    def _first_ranks(self, each: int | None) -> dict[str, tuple[int, int]]:
        """Return the first and the last rank of each node; nothing where that is not certain."""
        if each is None or not self._is_wrapped:
            return {}
        found = {node: (each * index, each * index + each - 1) for index, node in enumerate(self._launch)}
        for rank, node in self._placed.items():
            first, last = found.get(node, (0, -1))
            if not first <= rank <= last:
                return {}
        return found

    def _node(self, name: str, ranks: tuple[int, int] | None) -> Node:
        state, why = self._state(name)
        ended = self._ended.get(name, {})
        runs = ranks is not None and self._runs and state is not NodeState.LEFT
        return Node(
            name=name,
            state=state,
            why=why,
            step_seconds=self._own.get(name),
            slowest_rank=self._slowest.get(name),
            ended=ended,
            ranks=ranks,
            running=ranks[1] - ranks[0] + 1 - len(ended) if ranks is not None and runs else 0,
        )

    def _state(self, name: str) -> tuple[NodeState, str]:
        if self._usable is not None and name not in self._usable:
            return NodeState.LEFT, self._left.get(name) or self._unfit.get(name, "")
        if name in self._unfit:
            return NodeState.UNFIT, self._unfit[name]
        if name in self._watcher_lost:
            return NodeState.LOST_WATCHER, self._watcher_lost[name]
        if ended := self._ended.get(name):
            return NodeState.RANKS_ENDED, in_words(ended)
        if name in self._slow:
            return NodeState.SLOW, f"{self._slow[name]:.2f} times as long for a step as the others"
        if self._launch and name not in self._launch:
            return NodeState.SPARE, ""
        return NodeState.IN_USE, ""


def in_words(ended: dict[int, str]) -> str:
    """Say how ranks ended.

    >>> in_words({3: "signal 9", 1: "exit code 1"})
    'rank 1: exit code 1, rank 3: signal 9'
    """
    shown = [f"rank {rank}: {how}" for rank, how in sorted(ended.items())[:ENDED_RANKS_MAX]]
    more = len(ended) - len(shown)
    return ", ".join([*shown, *([f"{more} more"] if more else [])])


def count(found: Iterable[Node]) -> dict[NodeState, int]:
    """Count nodes by their state, in the order of the states."""
    counts = Counter(node.state for node in found)
    return {state: counts[state] for state in NodeState if state in counts}
