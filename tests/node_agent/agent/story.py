"""Plays histories through the agent's `decide`, with a Slurm that is a list of nodes: no thread, no clock."""

from __future__ import annotations

import msgspec

from stepkeeper.node_agent.core import events as on
from stepkeeper.node_agent.core.decide import decide
from stepkeeper.node_agent.core.events import (
    AskNodes,
    CheckNode,
    Effect,
    ListJobs,
    Reboot,
    Record,
    RecordDrain,
    ResetGpus,
    Resume,
    SetDrain,
)
from stepkeeper.node_agent.core.plan import due_at
from stepkeeper.node_agent.core.state import Incident, Mode, Policy, State
from stepkeeper.node_agent.readings import NvmlState
from stepkeeper.node_agent.xid.catalogue import Action, Domain, Fault, Kind, Source
from stepkeeper.slurm.client import NodeFacts

replace = msgspec.structs.replace
ACT = Policy(mode=Mode.ACT)
PCI = "0000:3b:00.0"
UUID = "GPU-1"
ACTIONS = {
    13: Action.RESTART_JOB,
    31: Action.RESTART_JOB,
    43: Action.RESTART_JOB,
    45: Action.LOG,
    48: Action.DRAIN_RESET,
    63: Action.DEFER_RESET,
    64: Action.DRAIN_RMA,
    79: Action.DRAIN_REBOOT,
    94: Action.RESTART_JOB,
    119: Action.DRAIN_RESET,
    154: Action.DRAIN_RESET,
}


def fault(
    code: int | None, at: float, *, pci: str | None = PCI, source: Source = Source.KERNEL, **more: object
) -> Fault:
    """Return a sighting as `xid` would judge it."""
    values: dict[str, object] = {
        "at": at,
        "source": source,
        "kind": Kind.XID if code is not None else Kind.HEALTH,
        "action": ACTIONS[code] if code is not None else Action.DRAIN_RESET,
        "domain": Domain.HARDWARE,
        "why": f"the rule of {code}",
        "certain": code == 79,
        "code": code,
        "pci": pci,
    }
    return Fault(**{**values, **more})  # type: ignore[arg-type]


class Cluster:
    """Slurm's nodes, as all agents see and change them."""

    def __init__(self, *names: str) -> None:
        self.nodes = {name: NodeFacts(name=name, states=frozenset(("IDLE",)), partitions=("p",)) for name in names}
        self.away = False
        self.now = 0.0  # slurmctld's clock
        self.calls = 0
        self.slow_s = 0.01  # so long slurmctld takes to answer
        self.size = 0  # what it tells of its size

    def drain(self, name: str, reason: str, at: float) -> None:
        """Drain; Slurm notes whole seconds."""
        self.now = max(self.now, at)
        self.nodes[name] = replace(
            self.nodes[name], states=self.nodes[name].states | {"DRAIN"}, reason=reason, reason_at=float(int(self.now))
        )

    def resume(self, name: str) -> None:
        self.nodes[name] = replace(self.nodes[name], states=frozenset(("IDLE",)), reason="", reason_at=None)

    @property
    def held(self) -> set[str]:
        return {each.name for each in self.nodes.values() if each.ours and each.drained}


class Node:
    """One agent without its threads: what it asks for is done when the test says so."""

    def __init__(
        self,
        cluster: Cluster,
        name: str,
        policy: Policy = ACT,
        *,
        boot_id: str = "boot-1",
        nvml: NvmlState = NvmlState.ABSENT,
    ) -> None:
        self.cluster = cluster
        self.name = name
        self.policy = policy
        since = 0.0 if nvml is NvmlState.READY else None
        self.state = State(node=name, boot_id=boot_id, gpus=((PCI, UUID),), nvml=nvml, nvml_since=since)
        self.waiting: list[Effect] = []
        self.done: list[Effect] = []
        self.ledger: dict[str, Incident] = {}
        self.fit = ""  # what the checks say
        self.tells = True  # the driver knows of recovery actions
        self.asks = False  # a GPU that is not fit answers all the same
        self.blind = False  # NVML is not there when one looks
        self.jobs: tuple[int, ...] = ()
        self.owners: dict[int, int] = {}  # of jobs; another user for each that is not in it
        self.reset = ""  # what a reset says
        self.now = 0.0

    def feed(self, event: on.Event) -> None:
        self.now = max(self.now, event.at)
        decision = decide(self.state, event, self.policy)
        self.state = decision.state
        for effect in decision.effects:
            self.done.append(effect)
            if isinstance(effect, Record):
                self.ledger[effect.incident.id] = effect.incident
            if isinstance(effect, (AskNodes, SetDrain, Resume, Reboot, ResetGpus, CheckNode)):
                self.waiting.append(effect)
            if isinstance(effect, ListJobs):
                self.waiting.append(effect)

    def see(self, seen: Fault, at: float | None = None) -> None:
        self.feed(on.FaultSeen(at=seen.at if at is None else at, fault=seen))

    def answer(self, at: float) -> bool:  # noqa: C901 - one case an effect
        """Do the oldest thing that was asked for; False where nothing was."""
        if not self.waiting:
            return False
        at = self.cluster.now = max(at, self.cluster.now)
        effect = self.waiting.pop(0)
        error = "slurmctld does not answer" if self.cluster.away else ""
        self.cluster.calls += not isinstance(effect, (ListJobs, CheckNode, ResetGpus))
        match effect:
            case ListJobs():
                uids = tuple(sorted({self.owners.get(job, 1000 + job) for job in self.jobs}))
                uids = uids if all(uids) else ()
                self.feed(on.JobsListed(at=at, incident=effect.incident, jobs=self.jobs, uids=uids))
            case AskNodes():
                nodes = tuple(
                    each for each in self.cluster.nodes.values() if not effect.alone or each.name == self.name
                )
                nodes = () if error else nodes
                took_s = self.cluster.slow_s
                answer = on.NodesAnswered(
                    at=at,
                    call=effect.call,
                    nodes=nodes,
                    alone=effect.alone,
                    took_s=took_s,
                    cluster_size=self.cluster.size if effect.alone and took_s >= effect.crowded_s else 0,
                    error=error,
                )
                self.feed(answer)
            case SetDrain():
                if not error:
                    self.cluster.drain(self.name, effect.reason, at)
                self.feed(on.CallAnswered(at=at, call=effect.call, error=error))
            case Resume():
                if not error:
                    self.cluster.resume(self.name)
                self.feed(on.CallAnswered(at=at, call=effect.call, error=error))
            case CheckNode():
                self.feed(on.CallAnswered(at=at, call=effect.call, error=self.fit, looked=self._looked()))
            case ResetGpus():
                self.feed(on.CallAnswered(at=at, call=effect.call, error=self.reset))
            case Reboot():
                self.feed(on.CallAnswered(at=at, call=effect.call, error=error))
        return True

    def _looked(self) -> on.Looked | None:
        gpus = tuple(pci for pci, _ in self.state.gpus)
        well = () if self.fit else gpus
        answering = gpus if self.asks else well
        return (
            None
            if self.blind
            else on.Looked(answering=answering, well=well, vouched=well if self.tells else (), here=gpus)
        )

    def settle(self, until: float) -> None:
        """Let everything happen that is due by then, each call answered at once."""
        for _ in range(10_000):
            if self.answer(self.now):
                continue
            due = due_at(self.state)
            if due is None or due > until:
                self.now = until
                return
            self.feed(on.Tick(at=max(due, self.now)))
        raise AssertionError("it never comes to rest")

    def restart(self, at: float, *, boot_id: str | None = None, policy: Policy | None = None) -> None:
        """End without a word, and start anew from the ledger."""
        self.waiting.clear()
        boot = boot_id or self.state.boot_id
        incidents = tuple(sorted(self.ledger.values(), key=lambda each: each.first_at))
        known = max((each.sequence for each in incidents if each.boot_id == boot), default=-1)
        drains = [each.drain for each in self.done if isinstance(each, RecordDrain)]
        self.state = State(
            node=self.name,
            boot_id=boot,
            known_sequence=known,
            gpus=self.state.gpus,
            nvml=self.state.nvml,
            nvml_since=at if self.state.nvml is NvmlState.READY else None,
            incidents=incidents,
            drain=drains[-1] if drains else None,
        )
        self.policy = policy or self.policy
        self.feed(on.Started(at=at))

    def acts(self, kind: type[Effect]) -> list[Effect]:
        return [each for each in self.done if isinstance(each, kind)]

    @property
    def incident(self) -> Incident:
        """The only one."""
        (incident,) = self.state.incidents
        return incident
