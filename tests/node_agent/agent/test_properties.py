"""What holds for every history of faults, restarts and answers: what a cluster loses when it is broken."""

from __future__ import annotations

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from stepkeeper.node_agent.core.events import Record, Resume, SetDrain
from stepkeeper.node_agent.core.plan import due_at, limit
from stepkeeper.node_agent.core.state import Mode, Policy
from stepkeeper.node_agent.xid.catalogue import Action, Source
from tests.node_agent.agent.story import ACT, Cluster, Node, fault, replace

PROFILE = settings(
    max_examples=40,
    deadline=None,
    phases=(Phase.explicit, Phase.generate),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
T = 1_790_000_000.0
PCIS = ("0000:3b:00.0", "0000:5e:00.0")
PROGRAMS = (13, 31, 43, 45)
CODES = (13, 31, 43, 45, 48, 63, 64, 79, 94, 119, 154)
gaps = st.sampled_from([0.0, 0.1, 4.0, 29.0, 31.0, 4000.0, 90_000.0])
turns = st.tuples(
    gaps,
    st.sampled_from(CODES),
    st.sampled_from(PCIS),
    st.sampled_from([Source.KERNEL, Source.NVML]),
    st.integers(1, 3),  # the job that runs
)
histories = st.lists(turns, min_size=1, max_size=25)
CURES = Policy(mode=Mode.ACT, undrain=True, reset_gpus=True, reboot=True)


def play(node: Node, history: list[tuple[float, int, str, Source, int]]) -> None:
    at = T
    for gap, code, pci, source, job in history:
        at += gap
        node.settle(at)
        node.jobs = (job,)
        node.see(fault(code, at, pci=pci, source=source))
    node.settle(at + 1000.0)


@PROFILE
@given(st.lists(st.tuples(gaps, st.sampled_from(PROGRAMS), st.sampled_from(PCIS), st.just(Source.KERNEL), st.just(7))))
def test_faults_of_one_program_never_drain(history):
    """NVSentinel's issue 1748 counts 11,760 XID 45 on healthy nodes."""
    node = Node(Cluster("a"), "a")

    play(node, history)

    assert not node.acts(SetDrain)
    assert node.cluster.calls == 0


@PROFILE
@given(histories)
def test_an_action_is_never_lowered(history):
    node = Node(Cluster("a"), "a", CURES)
    highest: dict[str, Action] = {}

    play(node, history)

    for effect in node.acts(Record):
        incident = effect.incident
        before = highest.get(incident.id, Action.LOG)
        assert incident.action.severity >= before.severity
        highest[incident.id] = incident.action


@PROFILE
@given(histories)
def test_an_observing_agent_never_asks_slurm_for_anything(history):
    node = Node(Cluster("a"), "a", Policy())

    play(node, history)

    assert node.cluster.calls == 0


@PROFILE
@given(st.integers(2, 60), st.lists(st.integers(0, 59), max_size=60), st.randoms(use_true_random=False))
def test_the_breaker_holds_whatever_the_order(size, steps, chance):
    """Every node has a fault at once; answers come in any order."""
    cluster = Cluster(*(f"n{index:02d}" for index in range(size)))
    policy = replace(ACT, drains_per_hour=size)
    nodes = [Node(cluster, name, policy) for name in cluster.nodes]
    for node in nodes:
        node.see(fault(79, T))
    for index, step in enumerate(steps):
        nodes[step % size].answer(T + index * 0.05)
    for node in chance.sample(nodes, size):
        node.settle(T + 60)

    assert len(cluster.held) == min(size, limit(size, policy))


@PROFILE
@given(histories, st.lists(st.integers(0, 24), max_size=4))
def test_every_fault_that_drains_is_dealt_with_over_any_restarts(history, restarts):
    """None is lost, and what is drained is in the ledger."""
    cluster = Cluster("a", "b")
    node = Node(cluster, "a")
    at = T
    for index, (gap, code, pci, source, job) in enumerate(history):
        at += gap
        node.settle(at)
        node.jobs = (job,)
        node.see(fault(code, at, pci=pci, source=source, sequence=index, boot_id="boot-1"))
        if index in restarts:
            node.restart(at + 0.01)
    node.settle(at + 1000.0)

    assert all(each.settled for each in node.state.incidents)
    drains = any(each.action.drains for each in node.state.incidents)
    assert cluster.held == ({"a"} if drains else set())
    assert (node.state.drain is not None) == drains


@PROFILE
@given(histories, st.sampled_from(["fan", "stepkeeper: not ours"]))
def test_a_foreign_drain_is_never_touched(history, reason):
    cluster = Cluster("a", "b")
    cluster.drain("a", reason, T - 10)
    node = Node(cluster, "a", CURES)

    play(node, history)

    assert not node.acts(SetDrain)
    assert not node.acts(Resume)
    assert cluster.nodes["a"].reason == reason


@PROFILE
@given(histories)
def test_an_agent_always_comes_to_rest(history):
    """No history makes it spin: what is due lies ahead."""
    node = Node(Cluster("a", "b"), "a", CURES)

    play(node, history)

    due = due_at(node.state)
    assert due is None or due > node.now
