"""No open fault is forgotten: a repair that was seen ends it, or the checks and NVML, or a person has it in hand.

Slurm's answers come late, or never; the agent is killed between an act and its note; the breaker is open.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from stepkeeper.node_agent import ledger
from stepkeeper.node_agent.core import events as on
from stepkeeper.node_agent.core import plan
from stepkeeper.node_agent.core.events import (
    Alarm,
    AskNodes,
    CheckNode,
    Effect,
    Reboot,
    Record,
    RecordDrain,
    ResetGpus,
    Resume,
    SetDrain,
    Tell,
)
from stepkeeper.node_agent.core.plan import due_at, left_alone
from stepkeeper.node_agent.core.state import Mode, Outcome, Policy, State
from stepkeeper.node_agent.readings import Gpu, NvmlState
from stepkeeper.node_agent.xid.catalogue import Action, Fault, Kind, Source
from tests.node_agent.agent.story import ACT, PCI, UUID, Cluster, Node, fault, replace

T = 1_790_000_000.0
DAY = 86400.0
CURES = Policy(mode=Mode.ACT, undrain=True, reset_gpus=True, reboot=True)
OTHER = "0000:5e:00.0"


@pytest.fixture
def cluster() -> Cluster:
    return Cluster("a", "b", "c", "d")


@pytest.fixture
def node(cluster: Cluster) -> Node:
    return Node(cluster, "a")


def races(cluster: Cluster) -> Node:
    """Return a node whose agent has drained it, and is about to take the drain back: two others were first."""
    for name in ("b", "c"):
        cluster.drain(name, "stepkeeper: before", T - DAY)
    node = Node(cluster, "a")
    held, cluster.nodes = cluster.nodes, Cluster("a", "b", "c", "d").nodes  # it counted before they drained
    node.see(fault(79, T))
    while not isinstance(node.waiting[0], SetDrain):
        node.answer(T)
    node.answer(T)
    cluster.nodes = {**held, "a": cluster.nodes["a"]}
    while not node.acts(Resume):
        node.answer(T)
        if not node.waiting:
            node.feed(on.Tick(at=due_at(node.state) or T))
    return node


# --- a return whose answer is lost ----------------------------------------------------------------


@pytest.mark.parametrize("killed", [False, True])
def test_a_take_back_whose_answer_is_lost_leaves_the_fault_open(cluster: Cluster, *, killed: bool) -> None:
    """It took effect: nobody else returned the node, and its fault is watched until it may be drained."""
    node = races(cluster)
    resume = node.waiting.pop()
    assert isinstance(resume, Resume)
    cluster.resume("a")
    if killed:
        node.restart(T + 20)
    else:
        node.feed(on.CallAnswered(at=T + 12, call=resume.call, error="scontrol update: no answer in 10 s"))
    node.fit = "GPU recovery action 2: reboot the node"
    node.settle(T + 3600)
    assert node.incident.outcome is Outcome.TAKEN_BACK
    assert not node.incident.returned
    assert cluster.held == {"b", "c"}

    cluster.resume("b")
    node.settle(T + 3 * 3600)
    assert cluster.held == {"a", "c"}


def test_a_take_back_that_takes_effect_late_is_ours_too(cluster: Cluster) -> None:
    """When it does, the breaker has let us keep the drain: the agent drains the node again."""
    node = races(cluster)
    resume = node.waiting.pop()
    assert isinstance(resume, Resume)
    node.feed(on.CallAnswered(at=T + 12, call=resume.call, error="scontrol update: no answer in 10 s"))
    cluster.resume("b")
    node.settle(T + 60)
    assert cluster.held == {"a", "c"}

    cluster.resume("a")  # the controller gets to it now
    node.settle(T + 1000)
    assert cluster.held == {"a", "c"}
    assert node.incident.outcome is Outcome.DRAINED


def test_a_return_after_the_checks_whose_answer_is_lost_is_the_checks_word(cluster: Cluster) -> None:
    node = Node(cluster, "a", CURES)
    node.see(fault(48, T))
    node.settle(T + 10)
    while not node.acts(Resume):
        assert node.answer(node.now) or node.feed(on.Tick(at=due_at(node.state) or T)) is None
    resume = node.waiting.pop()
    assert isinstance(resume, Resume)
    cluster.resume("a")
    node.restart(T + 200)
    node.settle(T + 1000)

    assert node.incident.outcome is Outcome.RESOLVED
    assert not node.incident.returned


def test_a_reboot_whose_answer_is_lost_is_followed_by_its_checks(cluster: Cluster) -> None:
    """Slurm returns a node that it has rebooted: nobody else did."""
    node = Node(cluster, "a", CURES)
    node.see(fault(79, T))
    node.settle(T + 10)
    while not node.acts(Reboot):
        assert node.answer(node.now) or node.feed(on.Tick(at=due_at(node.state) or T)) is None
    node.waiting.clear()
    cluster.resume("a")
    node.fit = "7 of 8 GPUs are there"
    node.restart(T + 600, boot_id="boot-2")
    node.settle(T + 700)

    assert cluster.held == {"a"}
    assert node.state.incidents[0].action is Action.DRAIN_RMA


def test_a_reboot_that_a_person_called_off_is_not_waited_for(cluster: Cluster) -> None:
    node = Node(cluster, "a", CURES)
    node.see(fault(79, T))
    node.settle(T + 200)
    assert node.acts(Reboot)
    cluster.nodes["a"] = replace(cluster.nodes["a"], states=frozenset(("IDLE", "REBOOT_REQUESTED")))
    node.settle(T + 1000)
    assert node.state.drain is not None

    cluster.resume("a")
    node.settle(T + 2000)
    assert node.state.drain is None
    assert node.incident.returned


def test_a_drain_that_takes_effect_after_it_was_taken_back_is_held_again(cluster: Cluster) -> None:
    node = races(cluster)
    reason = cluster.nodes["a"].reason
    while node.answer(node.now):
        pass
    assert node.incident.outcome is Outcome.TAKEN_BACK
    cluster.resume("b")
    cluster.drain("a", reason, T + 60)  # the first of two tries, which the controller got to late
    node.settle(T + 5000)

    assert node.state.drain is not None
    assert node.incident.outcome is Outcome.DRAINED


def test_a_drain_without_its_incidents_note_is_asked_for_anew(cluster: Cluster) -> None:
    """An older version noted the end of a drain before those of its faults, and was killed in between."""
    node = Node(cluster, "a")
    node.see(fault(79, T))
    node.settle(T + 10)
    node.done.append(RecordDrain(drain=None))
    cluster.resume("a")
    node.restart(T + 20)
    node.settle(T + 100)

    assert cluster.held == {"a"}


# --- faults that were left alone ------------------------------------------------------------------


@pytest.mark.parametrize("code", [48, 79])
def test_a_record_stays_open_where_no_check_can_tell_whether_it_is_over(node: Node, code: int) -> None:
    """Drivers before R565 have no recovery action: a GPU that answers is all that NVML can tell."""
    node.tells = False
    node.cluster.drain("a", "Kill task failed", T)
    node.see(fault(code, T))
    node.settle(T + 1000)
    assert node.incident.outcome is Outcome.FOREIGN

    node.cluster.resume("a")
    node.settle(T + 2000)
    assert node.cluster.held == {"a"}


def test_what_nvml_alone_has_shown_it_can_take_back(node: Node) -> None:
    node.tells = False
    node.cluster.drain("a", "driver update", T)
    node.see(fault(None, T, source=Source.NVML, kind=Kind.LOST, pci=None, action=Action.DRAIN_REBOOT))
    node.settle(T + 100)
    node.cluster.resume("a")
    node.settle(T + 1000)

    assert node.incident.outcome is Outcome.PASSED
    assert not node.cluster.held


@pytest.mark.parametrize("code", [48, 79])
def test_a_reset_that_is_seen_ends_what_asked_for_one(node: Node, code: int) -> None:
    node.tells = False
    node.cluster.drain("a", "I reset it", T)
    node.see(fault(code, T))
    node.settle(T + 100)
    node.feed(on.GpusReset(at=T + 200, pci=OTHER, why="another GPU was reset"))
    assert node.incident.outcome is Outcome.FOREIGN
    node.feed(on.GpusReset(at=T + 200, why="the driver was loaded anew"))
    node.cluster.resume("a")
    node.settle(T + 2000)

    assert node.cluster.held == (set() if code == 48 else {"a"})  # no reset brings a GPU back onto the bus


def test_a_reboot_ends_what_was_left_alone(node: Node) -> None:
    node.tells = False
    node.cluster.drain("a", "fan", T)
    node.see(fault(79, T, boot_id="boot-1"))
    node.settle(T + 100)
    node.restart(T + 600, boot_id="boot-2")
    node.cluster.resume("a")
    node.settle(T + DAY)

    assert node.incident.outcome is Outcome.PASSED
    assert not node.cluster.held


@pytest.mark.parametrize("replaced", [False, True])
def test_a_broken_gpu_is_left_alone_over_a_reboot_until_it_is_replaced(node: Node, *, replaced: bool) -> None:
    node.cluster.drain("a", "fan", T)
    node.see(fault(64, T, boot_id="boot-1"))
    node.settle(T + 100)
    node.restart(T + 600, boot_id="boot-2")
    if replaced:
        node.state = replace(node.state, gpus=((PCI, "GPU-2"),))
    node.cluster.resume("a")
    node.settle(T + 4000)

    assert node.cluster.held == (set() if replaced else {"a"})


def test_the_breaker_keeps_what_no_check_can_end_and_says_it_once(cluster: Cluster) -> None:
    for name in ("b", "c"):
        cluster.drain(name, "stepkeeper: before", T - DAY)
    node = Node(cluster, "a")
    node.tells = False
    node.see(fault(48, T))
    node.settle(T + 7200)
    assert node.incident.outcome is Outcome.REFUSED
    assert len(node.acts(Alarm)) == 1

    cluster.resume("b")
    node.settle(T + 8000)
    assert cluster.held == {"a", "c"}


def test_the_breaker_is_asked_with_all_nodes_and_only_once_nobody_holds_the_node(cluster: Cluster) -> None:
    """A look at our own node alone must not take the breaker for closed, and a held node needs no list of all."""
    for name in ("b", "c"):
        cluster.drain(name, "stepkeeper: before", T - DAY)
    node = Node(cluster, "a")
    node.fit = "GPU recovery action 2: reboot the node"
    node.see(fault(79, T))
    node.settle(T + 60)
    assert node.incident.outcome is Outcome.REFUSED
    cluster.drain("a", "fan", T + 60)
    asked = len(node.acts(AskNodes))
    node.settle(T + 2 * 3600)
    while_held = node.acts(AskNodes)[asked:]
    assert all(each.alone for each in while_held)
    assert len(while_held) > 5, "every five minutes, once the first hour is over"

    cluster.resume("a")
    recorded = len(node.acts(Record))
    node.settle(T + 5 * 3600)

    lists = [each for each in node.acts(AskNodes)[asked:] if not each.alone]
    assert 2 <= len(lists) <= 5
    assert node.incident.outcome is Outcome.REFUSED
    assert len(node.acts(Record)) == recorded, "no drain was wanted meanwhile"
    assert cluster.held == {"b", "c"}


def test_a_refused_fault_spreads_its_list_of_all_nodes_where_slurm_is_slow(cluster: Cluster) -> None:
    """Thousands of agents that are restarted at once ask at once: about their own nodes only."""
    for name in ("b", "c"):
        cluster.drain(name, "stepkeeper: before", T - DAY)
    node = Node(cluster, "a")
    node.fit = "GPU recovery action 2: reboot the node"
    node.see(fault(79, T))
    node.settle(T + 60)
    cluster.slow_s = 2.0
    asked = len(node.acts(AskNodes))
    node.restart(T + 100)
    node.answer(T + 100)
    (first,) = node.acts(AskNodes)[asked:]
    assert first.alone
    due = due_at(node.state)
    assert due is not None
    assert T + 102 < due <= T + 102 + ACT.crowd_spread_max_s

    node.settle(due)

    assert [each.alone for each in node.acts(AskNodes)[asked:]] == [True, False]


def test_nobody_counts_all_nodes_for_a_fault_that_is_over(cluster: Cluster) -> None:
    for name in ("b", "c"):
        cluster.drain(name, "stepkeeper: before", T - DAY)
    node = Node(cluster, "a")
    node.fit = "GPU recovery action 1: reset the GPU"
    node.see(fault(48, T))
    node.settle(T + 60)
    cluster.slow_s = 2.0
    node.restart(T + 100)
    node.answer(T + 100)
    node.feed(on.GpusReset(at=T + 105, why="the driver was loaded anew"))
    assert node.incident.outcome is Outcome.PASSED
    asked = len(node.acts(AskNodes))
    node.see(fault(79, T + 500))

    while node.answer(T + 500):
        pass

    (first,) = node.acts(AskNodes)[asked:]
    assert first.alone, "the next fault asks about the own node first again"


@pytest.mark.campaign
def test_a_flood_pushes_out_nothing_that_was_left_alone(node: Node) -> None:
    node.tells = False
    node.cluster.drain("a", "fan", T)
    node.see(fault(48, T))
    node.settle(T + 10)
    for index in range(700):
        node.see(fault(43, T + 100 + 40 * index, pci=OTHER))
    node.settle(T + 12 * DAY)
    assert len(node.state.incidents) <= node.policy.incidents_max

    node.cluster.resume("a")
    node.settle(T + 13 * DAY)
    assert node.cluster.held == {"a"}


# --- maintenance ----------------------------------------------------------------------------------


def test_nothing_is_drained_inside_a_reservation_for_maintenance(node: Node) -> None:
    """Here the driver is changed: for minutes no GPU is there, and then all are."""
    states = frozenset(("IDLE", "MAINTENANCE", "RESERVED"))
    node.cluster.nodes["a"] = replace(node.cluster.nodes["a"], states=states)
    node.see(fault(None, T, source=Source.NVML, kind=Kind.LOST, pci=None, action=Action.DRAIN_REBOOT))
    node.settle(T + 3600)
    assert node.incident.outcome is Outcome.FOREIGN
    assert not node.acts(CheckNode)

    node.cluster.resume("a")
    node.settle(T + 2 * 3600)
    assert node.incident.outcome is Outcome.PASSED
    assert not node.acts(SetDrain)


def test_a_fault_that_outlasts_the_maintenance_is_drained(node: Node) -> None:
    states = frozenset(("IDLE", "MAINTENANCE", "RESERVED"))
    node.cluster.nodes["a"] = replace(node.cluster.nodes["a"], states=states)
    node.see(fault(None, T, source=Source.NVML, kind=Kind.LOST, pci=None, action=Action.DRAIN_REBOOT))
    node.settle(T + 3600)
    node.fit = "0 of 8 GPUs are there"
    node.cluster.resume("a")
    node.settle(T + 2 * 3600)

    assert node.cluster.held == {"a"}


def test_no_remedy_touches_a_node_in_maintenance(cluster: Cluster) -> None:
    node = Node(cluster, "a", CURES)
    node.see(fault(48, T))
    node.settle(T + 6)
    held = cluster.nodes["a"]
    cluster.nodes["a"] = replace(held, states=held.states | {"MAINTENANCE", "RESERVED"})
    node.settle(T + 3600)
    assert not node.acts(ResetGpus)

    cluster.nodes["a"] = held
    node.settle(T + 7200)
    assert node.acts(ResetGpus)


# --- one witness ----------------------------------------------------------------------------------


@pytest.fixture
def seeing(cluster: Cluster) -> Node:
    """A node with an NVML that answers."""
    return Node(cluster, "a", nvml=NvmlState.READY)


@pytest.mark.parametrize("code", [48, 64, 79, 119])
def test_what_only_the_kernel_log_says_is_doubted_where_nvml_finds_the_gpu_well(seeing: Node, code: int) -> None:
    seeing.tells = False
    seeing.see(fault(code, T))
    seeing.settle(T + 600)

    assert seeing.incident.outcome is Outcome.DOUBTED
    assert not seeing.cluster.calls
    assert not seeing.acts(Tell)  # no job leaves the node for it
    (alarm,) = seeing.acts(Alarm)
    assert isinstance(alarm, Alarm)
    assert "net.netfilter.nf_log_all_netns" in alarm.text


def test_a_look_does_not_wait_until_slurm_may_be_asked(seeing: Node) -> None:
    """Jobs hear of a second fault at once, while the drain for the first one waits its turn in a crowd."""
    seeing.cluster.slow_s = 2.0
    seeing.see(fault(79, T, source=Source.NVML))
    while seeing.answer(T + 1):
        pass
    turn = due_at(seeing.state)
    assert turn is not None
    assert turn > T + 20
    seeing.fit = "GPU recovery action 2: reboot the node"
    second = OTHER
    seeing.feed(on.GpusListed(at=T + 10, gpus=(Gpu(index=1, pci=second, uuid="GPU-2"),)))

    seeing.see(fault(79, T + 10, pci=second))
    while seeing.answer(T + 11):
        pass

    told = {each.incident.pci for each in seeing.acts(Tell)}
    assert told == {PCI, second}
    assert due_at(seeing.state) == turn
    assert ledger.verdict(seeing.state, T + 11, seeing.policy).fit
    assert len(seeing.acts(AskNodes)) == 1
    seeing.settle(turn + 10)
    assert seeing.cluster.held == {"a"}


@pytest.mark.parametrize("first", [Source.KERNEL, Source.NVML])
def test_an_event_of_nvml_agrees_and_no_look_is_waited_for(seeing: Node, first: Source) -> None:
    second = Source.NVML if first is Source.KERNEL else Source.KERNEL
    seeing.see(fault(79, T, source=first))
    seeing.see(fault(79, T + 0.005, source=second))
    seeing.waiting = [each for each in seeing.waiting if not isinstance(each, CheckNode)]  # it hangs
    while seeing.answer(T + 0.01):
        pass

    assert seeing.cluster.held == {"a"}


def test_an_event_of_another_code_agrees_to_nothing(seeing: Node) -> None:
    """A null pointer makes a real XID 31, and the kernel log is forged right after."""
    seeing.see(fault(31, T, source=Source.NVML))
    seeing.see(fault(31, T))
    seeing.see(fault(79, T + 1))
    seeing.settle(T + 600)

    assert seeing.incident.outcome is Outcome.DOUBTED
    assert not seeing.cluster.held


@pytest.mark.parametrize("how", ["unfit", "blind", "stuck"])
def test_a_gpu_that_nvml_does_not_find_well_is_drained(seeing: Node, how: str) -> None:
    seeing.see(fault(79, T))
    if how == "stuck":
        seeing.feed(on.NvmlStands(at=T + 1, state=NvmlState.STUCK))
    seeing.fit = "lost" if how == "unfit" else ""
    seeing.blind = how == "blind"
    seeing.settle(T + 60)

    assert seeing.cluster.held == {"a"}
    assert seeing.acts(Tell)


@pytest.mark.parametrize("code", [48, 79])
def test_a_gpu_that_answers_is_on_the_bus_whatever_else_it_asks_for(seeing: Node, code: int) -> None:
    """A row that waits for a reset is common, and makes no forged XID 79 true."""
    seeing.fit, seeing.asks = "a memory row waits for a reset", True
    seeing.see(fault(code, T))
    seeing.settle(T + 60)

    assert seeing.cluster.held == ({"a"} if code == 48 else set())


def test_an_nvml_that_is_older_than_a_code_agrees_to_it(seeing: Node) -> None:
    seeing.see(fault(119, T))
    seeing.see(replace(fault(119, T + 1, source=Source.NVML), code=999, action=Action.LOG))
    seeing.settle(T + 60)

    assert seeing.cluster.held == {"a"}


def test_a_gpu_that_is_not_in_this_node_is_no_reason(seeing: Node) -> None:
    seeing.fit = "something else"
    seeing.see(fault(79, T, pci="fade:3b:00.0"))
    seeing.settle(T + 600)

    assert seeing.incident.outcome is Outcome.DOUBTED


def test_what_was_doubted_is_drained_when_nvml_sees_it(seeing: Node) -> None:
    seeing.see(fault(79, T))
    seeing.settle(T + 5)
    seeing.see(fault(None, T + 10, source=Source.NVML, kind=Kind.LOST, action=Action.DRAIN_REBOOT, certain=True))
    seeing.settle(T + 60)

    assert seeing.cluster.held == {"a"}


def test_of_a_fault_before_nvml_was_listened_to_only_a_recovery_action_tells(cluster: Cluster) -> None:
    """The agent starts, and reads a record of an hour ago: its event was missed."""
    for name, tells in (("a", False), ("b", True)):
        node = Node(cluster, name, nvml=NvmlState.ABSENT)
        node.tells = tells
        node.feed(on.NvmlStands(at=T, state=NvmlState.READY))
        node.see(fault(119, T - 3600), at=T)
        node.settle(T + 600)

    assert cluster.held == {"a"}


def test_a_fault_of_a_switch_needs_no_word_of_nvml(seeing: Node) -> None:
    seeing.see(fault(79, T, kind=Kind.SXID, pci="0000:06:00.0"))
    seeing.settle(T + 60)

    assert seeing.cluster.held == {"a"}


def test_a_look_that_was_due_at_a_kill_is_made_after_it(seeing: Node) -> None:
    seeing.see(fault(79, T, boot_id="boot-1", sequence=1))
    seeing.restart(T + 5)
    seeing.fit = "lost"
    seeing.settle(T + 60)

    assert seeing.cluster.held == {"a"}


def test_a_look_that_was_due_before_a_reboot_is_not_made(seeing: Node) -> None:
    seeing.see(fault(79, T, boot_id="boot-1", sequence=1))
    seeing.restart(T + 300, boot_id="boot-2")
    seeing.fit = "lost"
    seeing.settle(T + 600)

    assert not seeing.cluster.held
    assert seeing.incident.outcome is Outcome.NOTED


# --- every history --------------------------------------------------------------------------------

HISTORIES = settings(
    max_examples=100,
    deadline=None,
    phases=(Phase.explicit, Phase.generate),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


class World:
    """A node with a GPU that is bad or not, a Slurm that answers or not, people, and an agent that is killed."""

    def __init__(self, policy: Policy, *, visible: bool) -> None:
        self.cluster = Cluster("a", "b", "c", "d")
        self.node = Node(self.cluster, "a", policy)
        self.visible = visible  # a look shows that the GPU is bad, and the driver knows of recovery actions
        self.bad = False
        self.known = False  # a person has returned the node, knowing of the fault
        self.records: list[Fault] = []  # of this boot, in the kernel log
        self.boot = 1
        self.late: list[Effect] = []  # what the controller has not got to yet
        self.lines: list[Effect] = []  # of the ledger, in order
        self.durable = 0  # so many of them are on the disk in any case
        self.noted = 0

    @property
    def now(self) -> float:
        return self.node.now

    def fault(self, code: int) -> None:
        node = self.node
        self.pass_time(31.0)
        seen = fault(code, node.now, sequence=len(self.records), boot_id=f"boot-{self.boot}")
        self.records.append(seen)
        self.bad, self.known = True, False
        node.see(seen)

    def note(self) -> None:
        """Take over what the agent has given to the ledger's thread."""
        new = [each for each in self.node.done[self.noted :] if isinstance(each, (Record, RecordDrain))]
        self.lines += new
        self.noted = len(self.node.done)

    def answer(self, how: str) -> bool:
        """Do the oldest thing that was asked for, well or not."""
        node = self.node
        node.fit = "a GPU asks for a reset" if self.bad and self.visible else ""
        node.tells = self.visible
        self.note()
        if not node.waiting:
            return False
        effect = node.waiting[0]
        acts = isinstance(effect, (SetDrain, Resume, Reboot))
        if isinstance(effect, (Resume, Reboot)):
            self.durable = len(self.lines)  # it waits for its note
        if not acts or how == "well":
            if isinstance(effect, ResetGpus):
                self.bad = False
            node.answer(node.now)
            return True
        node.waiting.pop(0)
        if how == "lost":
            self.perform(effect)
        elif how == "late":
            self.late.append(effect)
        node.feed(on.CallAnswered(at=node.now + 10.0, call=effect.call, error="no answer in 10 s"))
        return True

    def perform(self, effect: Effect) -> None:
        if isinstance(effect, SetDrain):
            self.cluster.drain("a", effect.reason, self.now)
        elif isinstance(effect, Resume):
            self.cluster.resume("a")
        else:
            self.reboot()
            self.cluster.resume("a")

    def catch_up(self) -> None:
        """The controller gets to what it had not."""
        late, self.late = self.late, []
        for effect in late:
            self.perform(effect)

    def kill(self, lost: int, *, acted: bool) -> None:
        """SIGKILL: the newest lines of the ledger may be lost, and what was asked for may be done all the same."""
        self.note()
        effect = next(iter(self.node.waiting), None)
        if acted and isinstance(effect, (SetDrain, Resume, Reboot)):
            if not isinstance(effect, SetDrain):
                self.durable = len(self.lines)
            self.perform(effect)
        self.lines = self.lines[: max(self.durable, len(self.lines) - lost)]
        self.begin(self.now + 1.0)

    def begin(self, at: float) -> None:
        """Start an agent from what the ledger holds; it reads the kernel log from behind what it knows."""
        node = self.node
        node.waiting.clear()
        incidents = {each.incident.id: each.incident for each in self.lines if isinstance(each, Record)}
        drains = [each.drain for each in self.lines if isinstance(each, RecordDrain)]
        boot = f"boot-{self.boot}"
        node.state = State(
            node="a",
            boot_id=boot,
            known_sequence=max((each.sequence for each in incidents.values() if each.boot_id == boot), default=-1),
            gpus=((PCI, UUID),),
            nvml=NvmlState.ABSENT,
            incidents=tuple(sorted(incidents.values(), key=lambda each: each.first_at)),
            drain=drains[-1] if drains else None,
        )
        self.durable = len(self.lines)
        node.feed(on.Started(at=at))
        for record in self.records:
            node.see(record, at)

    def reboot(self) -> None:
        """The machine starts anew, GPUs and all."""
        self.note()
        self.boot += 1
        self.bad, self.records = False, []
        self.durable = len(self.lines)  # a shutdown in good order
        self.begin(self.now + 120.0)

    def person_returns(self) -> None:
        self.known = self.known or self.cluster.nodes["a"].ours or self.node.state.drain is not None
        self.cluster.resume("a")

    def person_drains(self) -> None:
        self.cluster.drain("a", "fan", self.now)

    def pass_time(self, seconds: float) -> None:
        until = self.now + seconds
        for _ in range(1000):
            if self.answer("well"):
                continue
            due = due_at(self.node.state)
            if due is None or due > until:
                self.node.now = max(self.now, until)
                return
            self.node.feed(on.Tick(at=max(due, self.now)))
        raise AssertionError("it never comes to rest")


steps = st.one_of(
    st.tuples(st.just("fault"), st.sampled_from([48, 79, 119])),
    st.tuples(st.just("answer"), st.sampled_from(["well", "well", "lost", "late", "failed"])),
    st.tuples(st.just("tick"), st.just(0)),
    st.tuples(st.just("time"), st.sampled_from([2.0, 61.0, 301.0, 4000.0])),
    st.tuples(st.just("kill"), st.integers(0, 3)),
    st.tuples(st.just("kill acted"), st.integers(0, 3)),
    st.tuples(st.just("catch up"), st.just(0)),
    st.tuples(st.just("person returns"), st.just(0)),
    st.tuples(st.just("person drains"), st.just(0)),
    st.tuples(st.just("reboot"), st.just(0)),
    st.tuples(st.just("others drain"), st.just(0)),
    st.tuples(st.just("others return"), st.just(0)),
)
policies = st.sampled_from([ACT, CURES, replace(ACT, undrain=True), replace(CURES, reset_gpus=False)])


def play(world: World, step: str, value: object) -> None:  # noqa: C901, PLR0912 - one case a step
    match step:
        case "fault":
            assert isinstance(value, int)
            world.fault(value)
        case "answer":
            world.answer(str(value))
        case "tick":
            due = due_at(world.node.state)
            if due is not None:
                world.node.feed(on.Tick(at=max(due, world.now)))
        case "time":
            assert isinstance(value, float)
            world.pass_time(value)
        case "kill" | "kill acted":
            assert isinstance(value, int)
            world.kill(value, acted=step == "kill acted")
        case "catch up":
            world.catch_up()
        case "person returns":
            world.person_returns()
        case "person drains":
            world.person_drains()
        case "reboot":
            world.reboot()
        case "others drain":
            for name in ("b", "c"):
                world.cluster.drain(name, "stepkeeper: theirs", world.now)
        case _:
            for name in ("b", "c"):
                world.cluster.resume(name)


@HISTORIES
@given(policies, st.booleans(), st.lists(steps, max_size=30))
def test_a_bad_gpu_in_service_is_watched_or_a_person_has_returned_it(policy, visible, history):
    """Whatever answers are lost, whenever the agent is killed, and whoever holds the node meanwhile."""
    world = World(policy, visible=visible)
    for step, value in history:
        play(world, step, value)
    world.catch_up()
    world.pass_time(6000.0)  # what the breaker refused is looked at once an hour

    own = world.cluster.nodes["a"]
    state = world.node.state
    if world.bad and not own.drained and not world.known:
        refused = plan.breaker_refuses(own, tuple(world.cluster.nodes.values()), world.now, policy)
        assert refused, state.incidents
        assert left_alone(state), state.incidents
    if own.ours and own.drained:
        assert state.drain is not None
        assert state.drain.reason == own.reason
