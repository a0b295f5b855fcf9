"""The agent's rules, one story a test, on a Slurm that is a list."""

from __future__ import annotations

import pytest

from stepkeeper.node_agent import ledger
from stepkeeper.node_agent.core import events as on
from stepkeeper.node_agent.core.events import Alarm, AskNodes, CheckNode, Reboot, ResetGpus, Resume, SetDrain
from stepkeeper.node_agent.core.plan import due_at
from stepkeeper.node_agent.core.state import Mode, Outcome, Policy
from stepkeeper.node_agent.xid.catalogue import Action, Kind, Source
from stepkeeper.slurm.client import REASON_PREFIX, NodeFacts
from tests.node_agent.agent.story import ACT, CURES, DAY, PCI, UUID, Cluster, Node, T, fault, replace

# --- gathering ------------------------------------------------------------------------------------


def test_a_certain_fault_waits_for_nothing(node: Node) -> None:
    """From the kernel's line to the drain there are two calls and no pause."""
    node.see(fault(79, T))
    while node.answer(T):
        pass

    (drain,) = node.acts(SetDrain)
    assert node.cluster.held == {"a"}
    assert drain.reason == f"stepkeeper: XID 79 GPU {PCI} ({UUID}) drain_reboot: the rule of 79 [a.1790000000]"


def test_an_uncertain_fault_waits_for_the_rest_of_its_burst(node: Node) -> None:
    node.see(fault(48, T))
    node.settle(T + 4.9)
    assert not node.cluster.held

    node.settle(T + 5.1)
    assert node.cluster.held == {"a"}


def test_a_burst_is_one_incident_and_only_raised(node: Node) -> None:
    """48 comes with 63, 45 on every channel, and 154 last."""
    for index, code in enumerate((48, 63, 45, 45, 45, 154)):
        node.see(fault(code, T + index / 10))

    assert node.incident.action is Action.DRAIN_RESET
    assert node.incident.codes == (48, 63, 45, 154)
    assert (node.incident.name, node.incident.count) == ("XID 48", 6)


def test_a_raise_after_the_window_counts_at_once(node: Node) -> None:
    """154 is logged after its cause, from a work item that may be late."""
    node.see(fault(94, T))
    node.settle(T + 10)
    assert node.incident.outcome is Outcome.NOTED

    node.see(fault(154, T + 12))
    node.settle(T + 12)

    assert node.cluster.held == {"a"}
    assert node.incident.name == "XID 94"  # what 154 recommends is about its cause


def test_kernel_and_nvml_and_the_second_line_are_one(node: Node) -> None:
    node.see(fault(79, T, sequence=7))
    node.see(fault(79, T + 0.2, source=Source.NVML))
    node.see(fault(None, T + 0.3, kind=Kind.LOST, action=Action.DRAIN_REBOOT))
    node.see(fault(None, T + 3600, pci=None, gpu=UUID, kind=Kind.LOST, action=Action.DRAIN_REBOOT, source=Source.NVML))
    node.see(fault(None, T + 7200, pci=None, kind=Kind.LOST, action=Action.DRAIN_REBOOT, source=Source.NVML))

    assert node.incident.count == 5


def test_two_gpus_are_two_incidents(node: Node) -> None:
    node.see(fault(79, T))
    node.see(fault(79, T, pci="0000:5e:00.0"))

    assert {each.id for each in node.state.incidents} == {"a.1790000000", "a.1790000000.2"}


def test_a_code_names_what_nvml_saw_first(node: Node) -> None:
    node.see(fault(None, T, kind=Kind.LOST, action=Action.DRAIN_REBOOT, source=Source.NVML))
    node.see(fault(79, T + 1))

    assert node.incident.name == "XID 79"


@pytest.mark.parametrize("code", [13, 31, 43, 45, 63])
def test_what_does_not_drain_stays_in_the_ledger(node: Node, code: int) -> None:
    node.see(fault(code, T))
    node.settle(T + 60)

    assert node.incident.outcome is Outcome.NOTED
    assert node.cluster.calls == 0


def test_health_that_stays_bad_is_one_incident(node: Node) -> None:
    node.see(fault(None, T))
    node.settle(T + 10)
    for hour in range(1, 30):
        node.see(fault(None, T + 3600 * hour, source=Source.NVML))

    assert node.incident.count == 30
    assert len(node.acts(SetDrain)) == 1


# --- restarts -------------------------------------------------------------------------------------


def test_a_restarted_agent_knows_the_records_that_it_has_seen(node: Node) -> None:
    node.see(fault(79, T, sequence=12, boot_id="boot-1"))
    node.settle(T)
    node.restart(T + 60)
    node.see(fault(79, T, sequence=12, boot_id="boot-1"), at=T + 61)
    node.settle(T + 90)

    assert node.incident.count == 1
    assert len(node.acts(SetDrain)) == 1


def test_the_numbers_of_another_boot_say_nothing(node: Node) -> None:
    node.see(fault(31, T, sequence=5000, boot_id="boot-1"))
    node.settle(T + 10)
    node.restart(T + 600, boot_id="boot-2")
    node.see(fault(79, T + 700, sequence=12, boot_id="boot-2"))
    node.settle(T + 700)

    assert node.cluster.held == {"a"}


def test_an_incident_that_was_not_settled_is_taken_up_again(node: Node) -> None:
    """The agent died in the window of five seconds."""
    node.see(fault(48, T, sequence=1, boot_id="boot-1"))
    node.restart(T + 100)
    node.settle(T + 100)

    assert node.cluster.held == {"a"}


def test_a_drain_without_its_note_is_recognised(node: Node) -> None:
    """The agent died between Slurm's answer and the ledger."""
    node.see(fault(79, T, sequence=1, boot_id="boot-1"))
    node.answer(T)
    while node.waiting and not isinstance(node.waiting[0], SetDrain):
        node.answer(T)
    effect = node.waiting[0]
    node.cluster.drain("a", effect.reason, T)
    node.restart(T + 5)
    node.settle(T + 5)

    assert len(node.acts(SetDrain)) == 1
    assert node.incident.outcome is Outcome.DRAINED
    assert node.state.drain is not None


def test_what_was_only_observed_is_not_drained_later(cluster: Cluster) -> None:
    """Switching to mode act is no reason to drain for what happened last week."""
    node = Node(cluster, "a", Policy())
    node.see(fault(79, T, sequence=1, boot_id="boot-1"))
    node.settle(T + 10)
    node.restart(T + 20, policy=ACT)
    node.settle(T + 60)

    assert not cluster.held


def test_whoever_observes_undoes_nothing_either(cluster: Cluster) -> None:
    node = Node(cluster, "a", CURES)
    node.see(fault(79, T))
    node.settle(T)
    node.restart(T + 100, boot_id="boot-2", policy=replace(CURES, mode=Mode.OBSERVE))
    node.settle(T + 4000)

    assert cluster.held == {"a"}


def test_a_fault_that_was_logged_days_ago_needs_nvmls_word(node: Node) -> None:
    """The agent is installed on a node that was mended since without a reboot."""
    node.see(fault(48, T, sequence=1), at=T + 3 * DAY)
    node.settle(T + 3 * DAY + 60)
    assert node.incident.outcome is Outcome.NOTED

    node.see(fault(None, T + 3 * DAY + 70, source=Source.NVML))
    node.settle(T + 3 * DAY + 80)
    assert node.cluster.held == {"a"}


def test_a_fault_of_the_boot_before_was_mended_by_the_reboot(node: Node) -> None:
    node.see(fault(79, T - 500, boot_id="boot-0"), at=T)
    node.settle(T + 60)
    assert not node.cluster.held

    node.see(fault(64, T - 400, boot_id="boot-0", certain=True), at=T + 100)
    node.settle(T + 160)
    assert node.cluster.held == {"a"}  # a broken board is broken after a reboot too


# --- Slurm away -----------------------------------------------------------------------------------


def test_no_drain_is_forgotten_while_slurm_is_away(node: Node) -> None:
    node.cluster.away = True
    node.see(fault(79, T))
    node.settle(T + 3 * 3600)
    tries = node.cluster.calls
    node.cluster.away = False
    node.settle(T + 3 * 3600 + 100)

    assert node.cluster.held == {"a"}
    assert 100 < tries < 400  # about one a minute, after the first ones


def test_agents_do_not_all_come_back_at_the_same_moment(cluster: Cluster) -> None:
    cluster.away = True
    moments = set()
    for name in cluster.nodes:
        node = Node(cluster, name)
        node.see(fault(79, T))
        while node.answer(T):
            pass
        moments.add(node.state.retry_at)

    assert len(moments) == len(cluster.nodes)


def test_a_call_that_is_never_answered_is_made_again(node: Node) -> None:
    node.see(fault(79, T))
    node.waiting.clear()
    node.settle(T + 300)

    assert node.cluster.held == {"a"}


def test_the_answer_to_a_call_that_was_given_up_counts_for_nothing(node: Node) -> None:
    node.see(fault(79, T))
    asked = next(each for each in node.waiting if isinstance(each, AskNodes))
    node.waiting.clear()
    node.feed(on.Tick(at=T + 121))
    node.feed(on.NodesAnswered(at=T + 121, call=asked.call, nodes=tuple(node.cluster.nodes.values())))

    assert not node.acts(SetDrain)


# --- other people's drains ------------------------------------------------------------------------


@pytest.mark.parametrize("states", [{"IDLE", "DRAIN"}, {"DOWN"}, {"MIXED", "DRAIN"}, {"DOWN", "DRAIN"}])
def test_what_somebody_else_took_is_his(cluster: Cluster, states: set[str]) -> None:
    node = Node(cluster, "a")
    cluster.nodes["a"] = replace(cluster.nodes["a"], states=frozenset(states), reason="fan", reason_at=T)
    node.see(fault(79, T))
    node.settle(T + 4000)

    assert node.incident.outcome is Outcome.FOREIGN
    assert cluster.nodes["a"].reason == "fan"


def test_a_note_on_a_node_in_service_is_kept_in_ours(node: Node) -> None:
    node.cluster.nodes["a"] = replace(node.cluster.nodes["a"], reason="fan is loud", reason_at=T)
    node.see(fault(79, T))
    node.settle(T)

    assert node.cluster.held == {"a"}
    assert "fan is loud" in node.cluster.nodes["a"].reason


def test_a_node_that_slurm_lost_sight_of_is_drained_when_it_is_back(node: Node) -> None:
    """Slurm would return it to service by itself, bad GPU and all."""
    node.cluster.nodes["a"] = replace(
        node.cluster.nodes["a"], states=frozenset(("DOWN",)), reason="Not responding", reason_at=T
    )
    node.see(fault(79, T))
    node.settle(T + 300)
    assert not node.cluster.held
    node.cluster.resume("a")
    node.settle(T + 400)

    assert node.cluster.held == {"a"}


def test_a_drain_that_was_taken_over_is_let_go(node: Node) -> None:
    node.see(fault(79, T))
    node.settle(T)
    node.cluster.drain("a", "mine now", T + 50)
    node.settle(T + 1000)

    assert node.state.drain is None
    assert node.incident.outcome is Outcome.FOREIGN
    assert node.cluster.nodes["a"].reason == "mine now"


def test_a_bad_gpu_on_a_node_that_others_returned_is_drained(node: Node) -> None:
    """Slurm had drained it for something else: whoever returned it may not have known of the GPU."""
    node.cluster.drain("a", "Kill task failed", T)
    node.see(fault(79, T))
    node.settle(T + 1000)
    assert node.incident.outcome is Outcome.FOREIGN
    assert not node.acts(CheckNode)
    asked = node.cluster.calls

    node.cluster.resume("a")
    node.fit = "GPU 0000:3b:00.0: NVML says that the GPU is lost"
    node.settle(T + 1400)

    assert asked <= 1 + 1000 / node.policy.watch_s
    assert node.cluster.held == {"a"}
    assert node.incident.outcome is Outcome.DRAINED


def test_a_gpu_that_was_mended_under_somebody_elses_drain_is_left_in_peace(node: Node) -> None:
    node.cluster.drain("a", "maintenance", T)
    node.see(fault(79, T))
    node.settle(T + 10)
    node.cluster.resume("a")
    node.settle(T + 1000)
    calls = node.cluster.calls
    node.settle(T + DAY)

    assert node.incident.outcome is Outcome.PASSED
    assert not node.cluster.held
    assert node.cluster.calls == calls  # over: Slurm is asked no more

    node.see(fault(None, T + DAY, source=Source.NVML))
    node.settle(T + DAY + 60)
    assert node.cluster.held == {"a"}


def test_what_the_breaker_refused_is_drained_when_it_may_be(cluster: Cluster) -> None:
    cluster.hold("b", "c")
    node = Node(cluster, "a")
    node.fit = "lost"
    node.see(fault(79, T))
    node.settle(T + 3600)
    assert node.incident.outcome is Outcome.REFUSED
    assert len(node.acts(Alarm)) == 1

    cluster.resume("b")
    node.restart(T + 3700)  # the watch outlives the agent
    node.settle(T + 4100)
    assert cluster.held == {"a", "c"}


def test_who_observes_watches_nothing_that_was_left_alone(node: Node) -> None:
    node.cluster.drain("a", "maintenance", T)
    node.see(fault(79, T))
    node.settle(T + 10)
    calls = node.cluster.calls
    node.restart(T + 100, policy=Policy())
    node.settle(T + DAY)

    assert node.cluster.calls == calls


@pytest.mark.parametrize("taken_over", [False, True])
def test_a_node_that_somebody_returned_with_its_fault_is_not_drained_by_a_restart(
    node: Node, *, taken_over: bool
) -> None:
    lasts = fault(None, T, source=Source.NVML, present_at_start=True)
    node.see(lasts)
    node.settle(T + 60)
    if taken_over:
        node.cluster.drain("a", "I look at it", T + 100)
        node.settle(T + 1000)
    node.cluster.resume("a")
    node.settle(T + 2000)
    alarms = len(node.acts(Alarm))

    node.restart(T + 3000)
    node.see(replace(lasts, at=T + 3001, action=Action.DRAIN_REBOOT))
    node.settle(T + 5000)
    assert not node.cluster.held
    assert len(node.acts(Alarm)) == alarms + 1

    node.see(replace(lasts, at=T + 6000, present_at_start=False))  # it was well in between
    node.settle(T + 6060)
    assert node.cluster.held == {"a"}


# --- the breaker ----------------------------------------------------------------------------------


def test_the_third_of_four_nodes_stays(cluster: Cluster) -> None:
    nodes = [Node(cluster, name) for name in cluster.nodes]
    for index, node in enumerate(nodes):
        node.see(fault(79, T + index))
        node.settle(T + index)

    assert cluster.held == {"a", "b"}
    assert [node.incident.outcome for node in nodes[2:]] == [Outcome.REFUSED] * 2
    assert all(node.acts(Alarm) for node in nodes[2:])


def test_of_agents_that_race_the_later_ones_give_back(cluster: Cluster) -> None:
    nodes = [Node(cluster, name) for name in cluster.nodes]
    for node in nodes:
        node.see(fault(79, T))
    for _ in range(10):  # in lockstep: all count before any drains
        for node in nodes:
            node.answer(T + 1)
    assert len(cluster.held) == 4
    for node in nodes:
        node.settle(T + 10)

    assert cluster.held == {"a", "b"}
    assert [node.incident.outcome for node in nodes] == [Outcome.DRAINED] * 2 + [Outcome.TAKEN_BACK] * 2


def test_an_hour_has_its_own_limit() -> None:
    cluster = Cluster(*(f"n{index:03d}" for index in range(200)))  # 5 % are 10 nodes
    nodes = [Node(cluster, name) for name in sorted(cluster.nodes)[:6]]
    for index, node in enumerate(nodes):
        node.see(fault(79, T + 60 * index))
        node.settle(T + 60 * index)
    assert len(cluster.held) == ACT.drains_per_hour

    late = Node(cluster, "n100")
    late.see(fault(79, T + 2 * 3600))
    late.settle(T + 2 * 3600)
    assert "n100" in cluster.held


def test_a_tie_in_one_second_is_told_by_name(cluster: Cluster) -> None:
    """Node `d` is done with everything before `a`, which had counted earlier, drains in the same second."""
    cluster.drain("b", "stepkeeper: before", T - 100)
    early, late = Node(cluster, "d"), Node(cluster, "a")
    for node in (early, late):
        node.see(fault(79, T))
        for _ in ("who is on the node", "how the node is", "how all nodes are"):
            node.answer(T + 0.1)
    while early.answer(T + 0.2):
        pass
    while late.answer(T + 0.3):
        pass
    for node in (early, late):
        node.settle(T + 10)

    assert cluster.held == {"a", "b"}


def test_drains_of_people_do_not_count(cluster: Cluster) -> None:
    for name in ("b", "c", "d"):
        cluster.drain(name, "maintenance", T)
    node = Node(cluster, "a")
    node.see(fault(79, T))
    node.settle(T)

    assert cluster.held == {"a"}


# --- escalation -----------------------------------------------------------------------------------


def test_a_second_time_in_a_week_is_for_a_person(node: Node) -> None:
    node.see(fault(48, T))
    node.settle(T + 10)
    node.cluster.resume("a")
    node.settle(T + DAY)
    node.see(fault(79, T + 6 * DAY))
    node.settle(T + 6 * DAY)

    assert node.state.incidents[-1].action is Action.DRAIN_RMA
    assert "XID 48 on this GPU 6.0 days before" in node.cluster.nodes["a"].reason


def test_a_fault_that_speaks_again_before_a_repair_is_no_second_one(node: Node) -> None:
    """XID 119 comes by the dozen, for as long as a job goes on: a reset has not even been tried."""
    for minute in range(10):
        node.see(fault(119, T + 60 * minute))
        node.settle(T + 60 * minute + 50)

    assert {each.action for each in node.state.incidents} == {Action.DRAIN_RESET}
    assert node.state.drain is not None
    assert node.state.drain.action is Action.DRAIN_RESET


def test_a_fault_after_a_reset_is_a_second_one_though_the_node_was_not_returned(cluster: Cluster) -> None:
    node = Node(cluster, "a", replace(CURES, undrain=False))
    node.see(fault(48, T))
    node.settle(T + 200)
    assert len(node.acts(ResetGpus)) == 1
    node.see(fault(48, T + 300))
    node.settle(T + 3600)

    assert node.state.incidents[-1].action is Action.DRAIN_RMA
    assert len(node.acts(ResetGpus)) == 1


def test_a_fault_that_was_only_observed_is_acted_on_where_it_lasts(cluster: Cluster) -> None:
    node = Node(cluster, "a", Policy())
    lasts = fault(None, T, source=Source.NVML, kind=Kind.LOST, action=Action.DRAIN_REBOOT)
    node.see(lasts)
    node.settle(T + 60)
    node.see(replace(lasts, at=T + 100))  # still observing
    node.settle(T + 160)
    assert node.incident.outcome is Outcome.OBSERVED

    node.restart(T + 200, policy=ACT)
    node.settle(T + 260)
    assert not cluster.held  # it may have been mended: only a look can tell
    node.see(replace(lasts, at=T + 300))
    node.settle(T + 360)

    assert cluster.held == {"a"}
    assert node.incident.outcome is Outcome.DRAINED


def test_a_fault_on_a_node_that_others_had_drained_is_judged_anew_where_it_lasts(node: Node) -> None:
    node.cluster.drain("a", "Kill task failed", T)
    lasts = fault(None, T, source=Source.NVML, kind=Kind.LOST, action=Action.DRAIN_REBOOT)
    node.see(lasts)
    node.settle(T + 60)
    node.cluster.resume("a")
    node.see(replace(lasts, at=T + 600))
    node.settle(T + 660)

    assert node.cluster.held == {"a"}


def test_a_drain_that_slurm_did_not_hear_of_before_the_reboot_waits_for_the_checks_only(cluster: Cluster) -> None:
    node = Node(cluster, "a", replace(CURES, reboot=True))
    cluster.away = True
    node.see(fault(79, T))
    node.settle(T + 60)
    cluster.away = False
    node.restart(T + 600, boot_id="boot-2")
    node.settle(T + 1200)

    assert node.acts(SetDrain)
    assert not node.acts(Reboot)
    assert node.acts(Resume)
    assert node.incident.outcome is Outcome.RESOLVED


def test_another_gpu_has_its_own_history(node: Node) -> None:
    node.see(fault(48, T, pci="0000:5e:00.0"))
    node.settle(T + 10)
    node.see(fault(79, T + DAY))
    node.settle(T + DAY)

    assert node.state.incidents[-1].action is Action.DRAIN_REBOOT


def test_a_board_takes_its_history_to_another_slot(node: Node) -> None:
    node.see(fault(48, T, pci="0000:5e:00.0", gpu=UUID))
    node.settle(T + 10)
    node.see(fault(48, T + DAY))  # its UUID is known from NVML
    node.settle(T + DAY + 10)

    assert node.state.incidents[-1].action is Action.DRAIN_RMA


PLACE = "GPC 2 TPC 3"


def _restarts(node: Node, *jobs: tuple[int, ...], code: int = 31, places: tuple[str, ...] = (PLACE,)) -> None:
    """Let a fault of programs happen every hour; `places`: of its lines, all of a burst."""
    for index, at_once in enumerate(jobs):
        node.jobs = at_once
        for part, place in enumerate(places):
            node.see(fault(code, T + 3600 * index + part / 10, place=place))
        node.settle(T + 3600 * index + 60)


def test_three_users_jobs_that_die_in_one_place_are_told_to_a_person(node: Node) -> None:
    """No drain: whoever has three accounts can prepare such faults."""
    _restarts(node, (1,), (2,), (3,))

    assert not node.cluster.held
    (alarm,) = node.acts(Alarm)
    assert isinstance(alarm, Alarm)
    assert f"3 faults (XID 31) at {PLACE} of this GPU in a day, over 3 jobs" in alarm.text
    assert "run a field diagnostic" in alarm.text

    for index in range(3, 5):  # the count begins anew
        node.jobs = (index + 10,)
        node.see(fault(31, T + 3600 * index, place=PLACE))
        node.settle(T + 3600 * index + 60)
    assert len(node.acts(Alarm)) == 1


@pytest.mark.parametrize("places", [("",), ("GPC 0 TPC 0", "GPC 0 TPC 1")])
def test_faults_all_over_the_gpu_are_the_programs(node: Node, places: tuple[str, ...]) -> None:
    """A null pointer faults wherever the program runs; older drivers do not say where."""
    _restarts(node, *((job,) for job in range(1, 10)), places=places)

    assert not node.acts(Alarm)


def test_faults_in_different_places_do_not_add_up(node: Node) -> None:
    for index in range(6):
        node.jobs = (index,)
        node.see(fault(31, T + 3600 * index, place=f"GPC {index} TPC 0"))
        node.settle(T + 3600 * index + 60)

    assert not node.acts(Alarm)


def test_one_job_that_fails_again_and_again_blames_itself(node: Node) -> None:
    """A buggy program that is requeued keeps its job id."""
    _restarts(node, *((1,) for _ in range(12)))

    assert not node.acts(Alarm)


def test_who_was_there_each_time_may_be_the_culprit(node: Node) -> None:
    """On a shared node others come and go beside the one with the bug."""
    _restarts(node, (1, 2), (1, 3), (1, 4), (1, 5))

    assert not node.acts(Alarm)


def test_faults_of_unknown_jobs_prove_nothing(node: Node) -> None:
    _restarts(node, (), (), (), (), ())

    assert not node.acts(Alarm)


def test_three_jobs_of_one_user_blame_their_program(node: Node) -> None:
    """Tasks of an array have job ids of their own, and one mistake in common."""
    node.owners = dict.fromkeys(range(1, 10), 1000)
    _restarts(node, *((job,) for job in range(1, 10)))
    assert not node.acts(Alarm)

    node.owners = {}
    node.jobs = (10,)
    node.see(fault(31, T + 10 * 3600, place=PLACE))
    node.settle(T + 10 * 3600 + 60)
    assert len(node.acts(Alarm)) == 1  # another user's job dies there as well


def test_a_user_who_was_there_each_time_may_be_the_culprit(node: Node) -> None:
    node.owners = dict.fromkeys((1, 3, 5, 7), 1000)
    _restarts(node, (1, 2), (3, 4), (5, 6), (7, 8))

    assert not node.acts(Alarm)


def test_jobs_of_unknown_owners_prove_nothing(node: Node) -> None:
    node.owners = dict.fromkeys(range(1, 10), 0)
    _restarts(node, *((job,) for job in range(1, 10)))

    assert not node.acts(Alarm)


def test_a_job_that_faults_on_all_its_gpus_blames_none_of_them(node: Node) -> None:
    for index in range(5):
        at = T + 3600 * index
        node.jobs = (index,)
        node.see(fault(31, at, place=PLACE))
        node.see(fault(31, at + 0.5, pci="0000:5e:00.0", place=PLACE))
        node.settle(at + 60)

    assert not node.acts(Alarm)


def test_43_never_counts_against_the_gpu(node: Node) -> None:
    _restarts(node, *((job,) for job in range(1, 12)), code=43)

    assert not node.acts(Alarm)


# --- back into service ----------------------------------------------------------------------------


def test_a_reset_node_is_checked_and_returned(cluster: Cluster) -> None:
    node = Node(cluster, "a", CURES)
    node.see(fault(48, T))
    node.settle(T + 200)

    kinds = [type(each) for each in node.done]
    assert kinds.index(ResetGpus) < kinds.index(CheckNode) < kinds.index(Resume)
    assert cluster.held == set()
    assert node.incident.outcome is Outcome.RESOLVED


def test_no_remedy_touches_a_node_in_use(cluster: Cluster) -> None:
    node = Node(cluster, "a", CURES)
    cluster.nodes["a"] = replace(cluster.nodes["a"], states=frozenset(("MIXED",)))
    node.see(fault(48, T))
    node.settle(T + 5000)
    assert not node.acts(ResetGpus)

    cluster.nodes["a"] = replace(cluster.nodes["a"], states=frozenset(("IDLE", "DRAIN")))
    node.settle(T + 5200)
    assert node.acts(ResetGpus)


def test_a_reset_in_vain_is_followed_by_a_reboot(cluster: Cluster) -> None:
    node = Node(cluster, "a", CURES)
    node.reset = "GPU 0000:3b:00.0 is in use"
    node.see(fault(48, T))
    node.settle(T + 200)

    assert node.acts(Reboot)
    assert cluster.held == {"a"}


def test_nothing_is_mended_without_leave(node: Node) -> None:
    node.see(fault(48, T))
    node.settle(T + DAY)

    assert not any(node.acts(kind) for kind in (ResetGpus, Reboot, Resume, CheckNode))


def test_after_a_reboot_the_drain_stays_until_the_checks_pass(cluster: Cluster) -> None:
    node = Node(cluster, "a", replace(ACT, undrain=True))
    node.see(fault(79, T))
    node.settle(T)
    node.fit = "7 of 8 GPUs are there"
    node.restart(T + 600, boot_id="boot-2")
    node.settle(T + 5000)
    assert cluster.held == {"a"}

    node.fit = ""
    node.settle(T + 6000)
    assert cluster.held == set()


def test_a_broken_gpu_is_never_returned_by_us(cluster: Cluster) -> None:
    node = Node(cluster, "a", CURES)
    node.see(fault(64, T, certain=True))
    node.settle(T)
    node.restart(T + 600, boot_id="boot-2")
    node.settle(T + DAY)

    assert cluster.held == {"a"}
    assert node.acts(CheckNode)


def test_a_reason_with_our_prefix_is_not_enough(cluster: Cluster) -> None:
    """Somebody copied our reason, or added a word to it: then it is his drain."""
    node = Node(cluster, "a", CURES)
    node.see(fault(79, T))
    node.settle(T)
    cluster.drain("a", f"{REASON_PREFIX} keep this one", T + 1)
    node.restart(T + 600, boot_id="boot-2")
    node.settle(T + 5000)

    assert cluster.nodes["a"].reason == f"{REASON_PREFIX} keep this one"
    assert not node.acts(Resume)


def test_a_rebooted_node_that_slurm_returned_is_drained_anew_if_it_fails(cluster: Cluster) -> None:
    node = Node(cluster, "a", CURES)
    node.see(fault(79, T))
    node.settle(T + 200)
    assert node.acts(Reboot)
    cluster.resume("a")  # nextstate=RESUME
    node.fit = "7 of 8 GPUs are there"
    node.restart(T + 600, boot_id="boot-2")
    node.settle(T + 700)

    assert cluster.held == {"a"}
    assert node.state.incidents[0].action is Action.DRAIN_RMA


def test_a_new_fault_after_the_repair_makes_it_worthless(cluster: Cluster) -> None:
    node = Node(cluster, "a", replace(ACT, undrain=True))
    node.see(fault(79, T, boot_id="boot-1"))
    node.settle(T)
    node.fit = "not yet"
    node.restart(T + 600, boot_id="boot-2")
    node.settle(T + 610)
    node.see(fault(79, T + 700, boot_id="boot-2"))
    node.fit = ""
    node.settle(T + DAY)

    assert cluster.held == {"a"}


def test_while_nothing_happens_slurm_is_not_asked(node: Node) -> None:
    node.feed(on.Started(at=T))
    node.see(fault(31, T))
    node.settle(T + 30 * DAY)

    assert node.cluster.calls == 0


@pytest.mark.campaign
def test_a_flood_does_not_grow_the_memory(node: Node) -> None:
    for index in range(1200):
        node.see(fault(31, T + 40 * index))

    assert len(node.state.incidents) <= node.policy.incidents_max


def test_a_reason_is_one_plain_line(node: Node) -> None:
    node.cluster.nodes["a"] = NodeFacts(
        name="a", states=frozenset(("IDLE",)), partitions=("p",), reason='x"\n\x1b[31m' + "y" * 500
    )
    node.see(fault(79, T))
    node.settle(T)

    (drain,) = node.acts(SetDrain)
    assert drain.reason.isprintable()
    assert drain.reason.isascii()
    assert len(drain.reason) <= 240
    assert drain.reason.endswith("[a.1790000000]")


def test_a_fault_alone_is_counted_at_once_and_a_crowd_spreads(node: Node) -> None:
    """All nodes are asked for only where Slurm told quickly of one."""
    node.see(fault(79, T))
    node.settle(T + 1)
    asked = [each.alone for each in node.acts(AskNodes)]
    assert asked[:2] == [True, False]
    assert node.incident.outcome is Outcome.DRAINED

    crowd = Cluster(*(f"n{number}" for number in range(40)))
    crowd.slow_s = 2.0
    nodes = [Node(crowd, name) for name in crowd.nodes]
    for each in nodes:
        each.see(fault(79, T))
        each.settle(T + 1)
    assert all(len(each.acts(AskNodes)) == 1 for each in nodes), "one look at the own node, and no more"
    assert not crowd.held
    counted = []
    for each in nodes:
        assert ledger.verdict(each.state, T + 1, ACT).fit, "a prolog that failed now would drain past the breaker"
        counted.append(due_at(each.state) - T)
        each.settle(T + 2 * ACT.crowd_spread)
    assert max(counted) <= 2.0 * ACT.crowd_spread + 1
    assert len({round(at / 60) for at in counted}) > 10, "spread over the whole time"
    assert 0 < len(crowd.held) <= ACT.nodes_min
    assert {each.incident.outcome for each in nodes} <= {Outcome.DRAINED, Outcome.REFUSED}


@pytest.mark.parametrize(("size", "longest_s"), [(4, 0.02), (40, 1.2), (1000, 700.0), (10_000, 3600.0)])
def test_a_slow_node_of_a_small_cluster_does_not_wait_for_a_crowd(
    cluster: Cluster, size: int, longest_s: float
) -> None:
    """A busy node starts Slurm's commands slowly: that looks like a busy controller."""
    cluster.slow_s, cluster.size = 5.0, size
    node = Node(cluster, "a")
    node.see(fault(79, T))
    while node.answer(T + 5):
        pass
    due = due_at(node.state)
    assert due is not None
    assert longest_s / 1000 < due - T - 5 <= longest_s

    node.settle(due + 5)

    assert node.incident.outcome is Outcome.DRAINED


def test_what_the_breaker_refused_costs_slurm_little_from_then_on(cluster: Cluster) -> None:
    """The node alone is asked about now and then, and all nodes once in an hour."""
    for name in ("b", "c"):
        cluster.drain(name, "stepkeeper: before", T - 7200)
    node = Node(cluster, "a")
    node.fit = "GPU 0000:3b:00.0: lost"
    node.see(fault(79, T))
    node.settle(T + 1)
    assert node.incident.outcome is Outcome.REFUSED
    before = sum(not each.alone for each in node.acts(AskNodes))

    node.settle(T + 4 * 3600)

    all_nodes = sum(not each.alone for each in node.acts(AskNodes)) - before
    assert 2 <= all_nodes <= 6
