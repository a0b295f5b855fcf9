"""Many agents against one slurmctld when a switch fails: `python -m tests.node_agent.agent.crowd 10000` prints a table.

The agents' real `decide` on a virtual clock.  slurmctld is one processor that serves calls in the order of their
arrival, at costs that `make bench-agents` measures; a real one has more processors, and other users.
"""

from __future__ import annotations

import heapq
import random
import sys
from collections import Counter

import msgspec

from stepkeeper.node_agent.core import events as on
from stepkeeper.node_agent.core.decide import decide
from stepkeeper.node_agent.core.events import AskNodes, CheckNode, Effect, Resume, SetDrain
from stepkeeper.node_agent.core.plan import due_at
from stepkeeper.node_agent.core.state import Mode, Outcome, Policy, State
from stepkeeper.slurm.client import NodeFacts
from tests.node_agent.agent.story import fault

CALL_WITHIN_S = 10.0  # then the agent's call is over, and slurmctld's work for it is not
FAULTS_WITHIN_S = 2.0
HOUR_S = 3600.0
T = 1_790_000_000.0


class Costs(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of slurmctld a call, munged's on its machine included, and bytes."""

    one_node_s: float
    each_node_s: float  # of a list of all nodes
    update_s: float
    each_node_bytes: int


MEASURED = Costs(one_node_s=0.0007, each_node_s=1.5e-6, update_s=0.0005, each_node_bytes=330)
SLOW = Costs(one_node_s=0.0003, each_node_s=7e-6, update_s=0.0005, each_node_bytes=530)
"""As an older machine was: a list costs more, which the agents' rules have to bear."""


class Load(msgspec.Struct, kw_only=True):
    """What the controller went through."""

    agents: int
    work_s: float  # in all
    work_first_minute_s: float
    longest_wait_s: float  # of any call: other users of Slurm waited as long
    calls_a_second: int  # at most
    lists: int
    lists_a_second: int  # at most
    gigabytes: float
    drained: int  # at the end
    drains: int  # that were made, those taken back included
    last_known_s: float  # after the failure: the last agent knows whether its node is drained
    work_next_hour_s: float


class Crowd:
    """All agents and their controller."""

    def __init__(self, agents: int, policy: Policy, costs: Costs) -> None:
        self.policy, self.costs = policy, costs
        names = [f"n{number}" for number in range(agents)]
        self.states = [State(node=name, boot_id="b") for name in names]
        self.number = {name: index for index, name in enumerate(names)}
        self.nodes = [NodeFacts(name=name, states=frozenset(("IDLE",)), partitions=("p",)) for name in names]
        self._all: tuple[NodeFacts, ...] | None = None
        self._events: list[tuple[float, int, int, on.Event | None]] = []
        self._order = 0
        self._free_at = T
        self.work: Counter[int] = Counter()  # microseconds by second
        self.calls: Counter[int] = Counter()
        self.lists: Counter[int] = Counter()
        self.longest_wait_s = 0.0
        self.drains = 0
        self.known_at: dict[int, float] = {}

    def play(self, until: float) -> None:
        """Let everything happen until then."""
        while self._events and self._events[0][0] <= until:
            at, _, agent, event = heapq.heappop(self._events)
            due = due_at(self.states[agent])
            if event is None and (due is None or due > at):
                continue  # it was put off meanwhile
            self._feed(agent, event or on.Tick(at=at))

    def put(self, at: float, agent: int, event: on.Event | None) -> None:
        """Have something happen to an agent."""
        self._order += 1
        heapq.heappush(self._events, (at, self._order, agent, event))

    def _feed(self, agent: int, event: on.Event) -> None:
        decision = decide(self.states[agent], event, self.policy)
        self.states[agent] = decision.state
        for effect in decision.effects:
            self._perform(agent, event.at, effect)
        if any(each.outcome not in (Outcome.OPEN, Outcome.SUSPECTED) for each in decision.state.incidents):
            self.known_at.setdefault(agent, event.at)
        if (due := due_at(decision.state)) is not None:
            self.put(max(due, event.at), agent, None)

    def _perform(self, agent: int, at: float, effect: Effect) -> None:
        match effect:
            case AskNodes():
                cost_s = self.costs.one_node_s if effect.alone else self.costs.each_node_s * len(self.nodes)
                if not effect.alone:
                    self.lists[int(at - T)] += 1
                done, error = self._serve(at, cost_s)
                took_s = done - at
                slow = effect.alone and not error and took_s >= effect.crowded_s
                nodes = () if error else (self.nodes[agent],) if effect.alone else self.all_nodes()
                self.put(
                    done,
                    agent,
                    on.NodesAnswered(
                        at=done,
                        call=effect.call,
                        nodes=nodes,
                        alone=effect.alone,
                        took_s=took_s,
                        cluster_size=len(self.nodes) if slow else 0,
                        error=error,
                    ),
                )
            case SetDrain():
                done, error = self._serve(at, self.costs.update_s)
                self.drains += 1
                self._change(agent, frozenset(("IDLE", "DRAIN")), effect.reason, float(int(done)))
                self.put(done, agent, on.CallAnswered(at=done, call=effect.call, error=error))
            case Resume():
                done, error = self._serve(at, self.costs.update_s)
                self._change(agent, frozenset(("IDLE",)), "", None)
                self.put(done, agent, on.CallAnswered(at=done, call=effect.call, error=error))
            case CheckNode():
                self.put(at + 1.0, agent, on.CallAnswered(at=at + 1.0, call=effect.call, error="GPU lost"))
            case _:
                pass  # for the ledger, the jobs and the log

    def _serve(self, at: float, cost_s: float) -> tuple[float, str]:
        """Return when a call is answered, and its error."""
        self.calls[int(at - T)] += 1
        self.work[int(at - T)] += round(cost_s * 1e6)
        self._free_at = max(self._free_at, at) + cost_s
        wait_s = self._free_at - at
        self.longest_wait_s = max(self.longest_wait_s, wait_s)
        if wait_s > CALL_WITHIN_S:
            return at + CALL_WITHIN_S, "no answer in 10 s"
        return self._free_at, ""

    def _change(self, agent: int, states: frozenset[str], reason: str, since: float | None) -> None:
        self.nodes[agent] = NodeFacts(
            name=self.nodes[agent].name, states=states, partitions=("p",), reason=reason, reason_at=since
        )
        self._all = None

    def all_nodes(self) -> tuple[NodeFacts, ...]:
        """Return all nodes; made anew only when one has changed."""
        if self._all is None:
            self._all = tuple(self.nodes)
        return self._all

    def worked_s(self, first: float, last: float) -> float:
        """Return the controller's work for calls that came in a time."""
        return sum(amount for second, amount in self.work.items() if first <= second < last) / 1e6


def switch_fails(
    agents: int, policy: Policy | None = None, costs: Costs = SLOW, *, hours: float = 2.0, seed: int = 1
) -> Load:
    """Let a GPU of every node fail within two seconds; return what slurmctld goes through in that time."""
    dice = random.Random(seed)  # noqa: S311 - a simulation
    crowd = Crowd(agents, policy or Policy(mode=Mode.ACT), costs)
    for agent in range(agents):
        at = T + FAULTS_WITHIN_S * dice.random()
        crowd.put(at, agent, on.FaultSeen(at=at, fault=fault(79, at)))
    crowd.play(T + min(hours, 1.0) * HOUR_S)
    in_first_hour = sum(crowd.lists.values())
    crowd.play(T + hours * HOUR_S)
    return Load(
        agents=agents,
        work_s=crowd.worked_s(0, HOUR_S),
        work_first_minute_s=crowd.worked_s(0, 60),
        longest_wait_s=crowd.longest_wait_s,
        calls_a_second=max(crowd.calls.values()),
        lists=in_first_hour,
        lists_a_second=max(crowd.lists.values()),
        gigabytes=in_first_hour * agents * costs.each_node_bytes / 1e9,
        drained=sum("DRAIN" in node.states for node in crowd.nodes),
        drains=crowd.drains,
        last_known_s=max(crowd.known_at.values()) - T,
        work_next_hour_s=crowd.worked_s(HOUR_S, 2 * HOUR_S),
    )


def main() -> int:
    for agents in map(int, sys.argv[1:] or ["10000"]):
        for name, policy in (("spread", None), ("all at once", Policy(mode=Mode.ACT, crowded_s=1e9))):
            load = switch_fails(agents, policy, MEASURED)
            print(name, msgspec.json.format(msgspec.json.encode(load)).decode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
