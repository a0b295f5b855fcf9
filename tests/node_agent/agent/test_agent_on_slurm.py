"""Agents on a real Slurm, with the machine's real kernel log: what becomes of a node whose GPU fails."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from stepkeeper.node_agent.protocol import SOCKET_VARIABLE, AgentClient, Look, Seen
from stepkeeper.node_agent.xid.catalogue import Action
from stepkeeper.watcher.messages import Assignment, Faulted
from stepkeeper.watcher.sensors import NodeSensors
from tests.lab import USERS, Lab
from tests.lab.agents import Agents

pytestmark = pytest.mark.slurm
QUICK = {"gather_s": 0.3, "retry_s": 0.2, "retry_max_s": 1.0, "watch_s": 1.0, "idle_poll_s": 0.5, "check_again_s": 0.5}
NOTHING_HAPPENS_S = 1.5
DRAINED_S = 60.0


@pytest.fixture(scope="module")
def cluster(lab_factory: Callable[..., Lab]) -> Lab:
    return lab_factory(nodes=4, gpus=2)


@pytest.fixture
def agents(cluster: Lab) -> Iterator[Agents]:
    with _agents(cluster) as agents:
        yield agents
    _restore(cluster)


@pytest.fixture
def gpu_agents(cluster: Lab) -> Iterator[Agents]:
    with _agents(cluster, nvml=True) as agents:
        yield agents
    _restore(cluster)


def _agents(lab: Lab, *, nvml: bool = False) -> Agents:
    agents = Agents(lab, nvml=nvml)
    for node in lab.node_names:
        agents.configure(node, test={"limits": QUICK})
    return agents


def _restore(lab: Lab) -> None:
    """Give the next test a lab in which nothing is drained."""

    def restored() -> bool:
        found = lab.nodes()
        for node in found.values():
            if "DRAIN" in node.state:  # refused while a restarted slurmctld has not heard of the node
                lab.run("scontrol", "update", f"NodeName={node.name}", "State=RESUME", check=False)
        return bool(found) and all(node.is_up for node in found.values())

    lab.until(restored, "idle nodes", 120)


def reason(lab: Lab, node: str) -> str:
    return lab.nodes()[node].reason


def is_drained(lab: Lab, node: str) -> bool:
    found = lab.nodes().get(node)  # none while slurmctld is away
    return found is not None and "DRAIN" in found.state


def wait_drained(lab: Lab, node: str) -> None:
    lab.until(lambda: is_drained(lab, node), f"{node} to be drained", DRAINED_S)


def stay_in_service(lab: Lab, *nodes: str) -> bool:
    time.sleep(NOTHING_HAPPENS_S)
    return not any(is_drained(lab, node) for node in nodes)


def test_a_lost_gpu_drains_its_node_and_no_other(cluster: Lab, gpu_agents: Agents) -> None:
    """The reason tells an administrator which GPU to look for."""
    bad, *others = cluster.node_names
    gpu_agents.start()
    gpu_agents.wait_event(bad, "nvml", text='"ready"')

    gpu_agents.inject(bad, 79)
    wait_drained(cluster, bad)

    pci, uuid = gpu_agents.pci(bad), gpu_agents.uuid(bad)
    (incident,) = gpu_agents.incidents(bad)
    assert reason(cluster, bad).startswith(f"stepkeeper: XID 79 GPU {pci} ({uuid}) drain_reboot: ")
    assert f"[{incident['id']}]" in reason(cluster, bad)
    assert (incident["outcome"], incident["gpu"], incident["driver"]) == ("drained", uuid, incident["driver"])
    assert incident["driver"]
    assert stay_in_service(cluster, *others)
    gpu_agents.wait_event(bad, "verdict", text='"fit": false')
    assert gpu_agents.verdict(others[0])["fit"] is True


def test_one_fault_of_two_sources_is_one_incident(cluster: Lab, gpu_agents: Agents) -> None:
    node = cluster.node_names[0]
    gpu_agents.start(node)
    gpu_agents.wait_event(node, "nvml", text='"ready"')
    gpu_agents.nvml[node].wait_for_call("nvmlEventSetWait_v2")

    gpu_agents.inject(node, 79)
    gpu_agents.nvml[node].xid(0, 79)
    gpu_agents.nvml[node].lose(0)
    wait_drained(cluster, node)

    def both() -> bool:
        return {source for each in gpu_agents.incidents(node) for source in each["sources"]} == {"kernel", "nvml"}

    cluster.until(both, "the word of the second source", DRAINED_S)
    time.sleep(NOTHING_HAPPENS_S)
    (incident,) = gpu_agents.incidents(node)
    assert set(incident["sources"]) == {"kernel", "nvml"}


def test_an_observing_agent_touches_nothing(cluster: Lab, agents: Agents) -> None:
    """New installations only observe: an administrator reads first what would have been drained."""
    node = cluster.node_names[0]
    agents.configure(node, mode="observe")
    agents.start(node)
    job = cluster.submit("sleep 600", sbatch_args=[f"-w{node}"], user=USERS[0])
    cluster.wait_job(job, "RUNNING")

    with AgentClient(str(agents.socket(node))) as client:
        client.join(job, 0)
        agents.inject(node, 79)
        agents.wait_event(node, "alarm", text="would be drained")
        at_once = _faults_told(cluster, client)
        client.send(Look(job_id=job, why="NCCL says that the GPU is dead"))
        time.sleep(NOTHING_HAPPENS_S)
        found = [message for message in client.receive() if isinstance(message, Seen) and message.action.drains]
    with AgentClient(str(agents.socket(node))) as client:
        client.join(job, 0)
        when_it_joins = _faults_told(cluster, client)
    watched = _faults_that_a_watcher_passes_on(cluster, agents.socket(node), job, node)
    cluster.cancel(job)
    cluster.wait_ended(job, 120)

    assert stay_in_service(cluster, node)
    assert [each["outcome"] for each in agents.incidents(node)] == ["observed"]
    assert agents.verdict(node)["fit"] is True
    for fault in (at_once, when_it_joins):
        assert (fault.name, fault.action, fault.observed) == ("XID 79", Action.LOG, Action.DRAIN_REBOOT)
        assert "only observes" in fault.why
    assert not found, "nothing to leave the node for"
    assert (watched.name, watched.action, watched.leave) == ("XID 79", "drain_reboot", False)


def _faults_told(lab: Lab, client: AgentClient) -> Seen:
    """Return the first fault that the agent tells."""
    seen: list[Seen] = []

    def heard() -> bool:
        seen.extend(message for message in client.receive() if isinstance(message, Seen))
        return bool(seen)

    lab.until(heard, "word of the fault", DRAINED_S)
    return seen[0]


def _faults_that_a_watcher_passes_on(lab: Lab, socket: Path, job: int, node: str) -> Faulted:
    """Return what the supervisor of a job on the node hears."""
    before = os.environ.get(SOCKET_VARIABLE)
    os.environ[SOCKET_VARIABLE] = str(socket)
    try:
        assignment = Assignment(
            run_directory="/nonexistent",
            run_id="r",
            job_id=job,
            slurm_name=str(job),
            restart_count=0,
            attempt=0,
            nodes=(node,),
            kill_wait_s=10.0,
            nonce="n",
        )
        senses = NodeSensors(assignment, node)
        senses.start()
        words: list[object] = []

        def heard() -> bool:
            words.extend(senses.take())
            return any(isinstance(word, Faulted) for word in words)

        lab.until(heard, "the watcher's word", DRAINED_S)
        senses.close()
    finally:
        os.environ.pop(SOCKET_VARIABLE)
        if before is not None:
            os.environ[SOCKET_VARIABLE] = before
    return next(word for word in words if isinstance(word, Faulted))


def test_what_programs_do_wrong_drains_nothing(cluster: Lab, agents: Agents) -> None:
    node = cluster.node_names[0]
    agents.start(node)

    for code in (13, 31, 43, 45):
        agents.inject(node, code)
    agents.wait_event(node, "incident", text='"noted"')

    assert stay_in_service(cluster, node)


@pytest.mark.campaign  # the rule itself: `test_decide`, in each run of the tests
def test_the_drain_of_somebody_else_is_left_alone(cluster: Lab, agents: Agents) -> None:
    node = cluster.node_names[0]
    agents.start(node)
    cluster.drain(node, "replacing a power supply")

    agents.inject(node, 79)
    agents.wait_event(node, "alarm", text="somebody else")

    assert reason(cluster, node).startswith("replacing a power supply")
    assert [each["outcome"] for each in agents.incidents(node)] == ["foreign"]


@pytest.mark.campaign
def test_a_drain_waits_for_slurmctld_and_is_made_once(cluster: Lab, agents: Agents) -> None:
    """A fault in the minutes of a failover must not be forgotten."""
    node = cluster.node_names[0]
    agents.start(node)
    cluster.stop_slurmctld()
    try:
        agents.inject(node, 79)
        agents.wait_event(node, "alarm", text="made again", within_s=120)
    finally:
        cluster.start_slurmctld()
    wait_drained(cluster, node)
    time.sleep(NOTHING_HAPPENS_S)

    assert len([each for each in agents.events(node, "decision") if "set_drain" in each["effects"]]) == 1
    assert [each["outcome"] for each in agents.incidents(node)] == ["drained"]


def test_a_killed_agent_finishes_its_drain_when_it_is_back(cluster: Lab, agents: Agents) -> None:
    """The fault is in the kernel log and the ledger; the agent dies before Slurm answers."""
    node = cluster.node_names[0]
    agents.start(node)
    cluster.stop_slurmctld()
    try:
        agents.inject(node, 79)
        agents.wait_event(node, "incident", text='"open"')
        agents.kill(node)
    finally:
        cluster.start_slurmctld()
    assert not is_drained(cluster, node)

    agents.start(node)
    wait_drained(cluster, node)

    (incident,) = agents.incidents(node)
    assert incident["count"] == 1


def test_a_killed_agent_counts_nothing_twice(cluster: Lab, agents: Agents) -> None:
    """After its restart it reads the same kernel log from the beginning."""
    node = cluster.node_names[0]
    agents.start(node)
    agents.inject(node, 79)
    agents.wait_event(node, "incident", text='"drained"')
    before = reason(cluster, node)
    agents.kill(node)

    agents.start(node)
    time.sleep(NOTHING_HAPPENS_S)

    assert [each["count"] for each in agents.incidents(node)] == [1]
    assert reason(cluster, node) == before


def test_a_fault_before_the_agent_started_is_not_missed(cluster: Lab, agents: Agents) -> None:
    node = cluster.node_names[0]
    agents.start(node)
    agents.stop(node)

    agents.inject(node, 79)
    agents.start(node)

    wait_drained(cluster, node)


def test_a_rebooted_node_stays_drained_until_it_passed_its_checks(cluster: Lab, gpu_agents: Agents) -> None:
    """A reboot wipes the kernel log: whoever only reads that would call the node healthy."""
    node = cluster.node_names[0]
    gpu_agents.configure(node, remedies={"undrain": True})
    gpu_agents.start(node)
    gpu_agents.inject(node, 79)
    gpu_agents.wait_event(node, "incident", text='"drained"')
    gpu_agents.stop(node)
    gpu_agents.boot(node)
    gpu_agents.nvml[node].count(1)  # the GPU has not come back

    gpu_agents.start(node)
    gpu_agents.wait_event(node, "decision", text="1 of 2 GPUs")
    assert is_drained(cluster, node)

    gpu_agents.stop(node)
    gpu_agents.nvml[node].count(2)
    gpu_agents.boot(node)
    gpu_agents.start(node)
    cluster.until(lambda: not is_drained(cluster, node), "the node's return", 120)

    assert "resolved" in [each["outcome"] for each in gpu_agents.incidents(node)]


def test_a_node_that_passed_waits_for_a_person_where_that_is_not_allowed(cluster: Lab, gpu_agents: Agents) -> None:
    node = cluster.node_names[0]
    gpu_agents.start(node)
    gpu_agents.inject(node, 79)
    gpu_agents.wait_event(node, "incident", text='"drained"')
    gpu_agents.stop(node)
    gpu_agents.boot(node)
    gpu_agents.start(node)

    gpu_agents.wait_event(node, "alarm", text="waits for a person")
    assert is_drained(cluster, node)

    cluster.undrain(node)
    gpu_agents.wait_event(node, "decision", text="somebody else returned the node")
    gpu_agents.wait_event(node, "verdict", text='"fit": true')


def test_only_our_own_drain_is_undone(cluster: Lab, gpu_agents: Agents) -> None:
    """An administrator who looks at the node says so in the reason, and from then on it is his."""
    node = cluster.node_names[0]
    gpu_agents.configure(node, remedies={"undrain": True})
    gpu_agents.start(node)
    gpu_agents.inject(node, 79)
    gpu_agents.wait_event(node, "incident", text='"drained"')
    gpu_agents.stop(node)
    cluster.drain(node, "stepkeeper: kept for the vendor, do not touch")
    gpu_agents.boot(node)

    gpu_agents.start(node)
    gpu_agents.wait_event(node, "decision", text="else")
    time.sleep(NOTHING_HAPPENS_S)

    assert is_drained(cluster, node)
    assert reason(cluster, node).startswith("stepkeeper: kept for the vendor")


@pytest.mark.campaign  # the rule itself: `test_decide`, in each run of the tests
def test_a_second_reset_in_a_week_is_for_a_person_to_look_at(cluster: Lab, gpu_agents: Agents) -> None:
    node = cluster.node_names[0]
    gpu_agents.configure(node, remedies={"undrain": True})
    gpu_agents.start(node)
    gpu_agents.inject(node, 48)
    gpu_agents.wait_event(node, "incident", text='"drained"')
    gpu_agents.stop(node)
    gpu_agents.boot(node)
    gpu_agents.start(node)
    cluster.until(lambda: not is_drained(cluster, node), "the node's return", 120)
    gpu_agents.wait_event(node, "nvml", text='"ready"', times=2)

    gpu_agents.inject(node, 48)
    wait_drained(cluster, node)
    assert "drain_rma: XID 48 on this GPU" in reason(cluster, node)

    gpu_agents.stop(node)
    gpu_agents.boot(node)
    gpu_agents.start(node)
    gpu_agents.wait_event(node, "alarm", text="waits for a person")
    assert is_drained(cluster, node)


@pytest.mark.campaign  # the rule itself: `test_decide`, in each run of the tests
def test_the_third_node_at_once_stays_in_service(cluster: Lab, agents: Agents) -> None:
    """What befalls many nodes at once is not their fault: two of four may go, one after the other or together."""
    agents.start()

    for node in cluster.node_names[:2]:
        agents.inject(node, 79)
    for node in cluster.node_names[:2]:
        wait_drained(cluster, node)
    agents.inject(cluster.node_names[2], 79)
    agents.wait_event(cluster.node_names[2], "alarm", text="circuit breaker")

    assert stay_in_service(cluster, *cluster.node_names[2:])
    assert agents.verdict(cluster.node_names[2])["fit"] is True


@pytest.mark.campaign
def test_agents_that_race_past_the_breaker_take_their_drains_back(cluster: Lab, agents: Agents) -> None:
    def drained() -> list[str]:
        return [node for node in cluster.node_names if is_drained(cluster, node)]

    def decided() -> bool:
        over = {"drained", "taken_back", "refused"}
        return all({each["outcome"] for each in agents.incidents(node)} & over for node in cluster.node_names)

    agents.start()

    for node in cluster.node_names:  # within a moment: each may count before any has drained
        agents.inject(node, 79)
    cluster.until(decided, "every agent to have decided", DRAINED_S)
    cluster.until(lambda: len(drained()) == 2, "two nodes to stay drained", DRAINED_S)
    time.sleep(NOTHING_HAPPENS_S)

    assert len(drained()) == 2


def test_the_capabilities_of_the_unit_are_enough(cluster: Lab, agents: Agents) -> None:
    """Reading the kernel log is all that needs one: draining is a matter of the user id."""
    node = cluster.node_names[0]
    agents.prefix = ("setpriv", "--bounding-set=-all,+syslog", "--inh-caps=-all,+syslog", "--no-new-privs")
    agents.start(node)

    agents.inject(node, 79)

    wait_drained(cluster, node)


@pytest.mark.campaign
def test_jobs_are_noted_and_three_of_them_have_the_gpu_named(cluster: Lab, gpu_agents: Agents) -> None:
    """XID 31 is a program's mistake; where programs of two users make it in one place, the agent raises an alarm."""
    node = cluster.node_names[0]
    gpu_agents.configure(node, test={"limits": {**QUICK, "join_s": 0.1}})
    gpu_agents.start(node)
    for number in range(3):
        job = cluster.submit("sleep 600", sbatch_args=[f"-w{node}"], user=USERS[number % 2])
        cluster.wait_job(job, "RUNNING")
        gpu_agents.inject(node, 31, text="Ch 00000010, intr 00000000. MMU Fault: ENGINE GRAPHICS GPC2 GPCCLIENT_T1_3")
        gpu_agents.wait_event(node, "incident", text=f'"jobs": [{job}]', times=1)
        if number < 2:
            cluster.cancel(job)
            cluster.wait_ended(job, 120)
    gpu_agents.wait_event(node, "alarm", text="3 faults (XID 31) at GPC 2 TPC 3 of this GPU in a day, over 3 jobs")
    cluster.cancel(job)
    cluster.wait_ended(job, 120)

    assert not is_drained(cluster, node)


@pytest.mark.campaign
def test_nothing_is_drained_in_a_reservation_for_maintenance(cluster: Lab, agents: Agents) -> None:
    """Slurm prints it as IDLE+MAINTENANCE+RESERVED; what is still there when it ends is drained then."""
    node = cluster.node_names[0]
    agents.start(node)
    words = ["ReservationName=mend", "StartTime=now", "Duration=60", "User=root", "Flags=maint,ignore_jobs"]
    cluster.run("scontrol", "create", "reservation", *words, f"Nodes={node}")
    try:
        cluster.until(lambda: "MAINT" in cluster.nodes()[node].state, "the maintenance", DRAINED_S)
        agents.inject(node, 79)
        agents.wait_event(node, "alarm", text="MAINTENANCE")
        assert stay_in_service(cluster, node)
    finally:
        cluster.run("scontrol", "delete", "ReservationName=mend")
    wait_drained(cluster, node)


def test_a_job_hears_of_its_nodes_faults_and_its_word_drains_nothing(cluster: Lab, gpu_agents: Agents) -> None:
    """A job that asks for a look gets what the agent itself sees, and the node is drained for that alone."""
    node = cluster.node_names[0]
    gpu_agents.start(node)
    gpu_agents.wait_event(node, "nvml", text='"ready"')
    job = cluster.submit("sleep 600", sbatch_args=[f"-w{node}"], user=USERS[0])
    cluster.wait_job(job, "RUNNING")
    with AgentClient(str(gpu_agents.socket(node))) as client:
        joined = client.join(job, 0)
        assert (joined.node, joined.acts) == (node, True)
        client.send(Look(job_id=job, why="NCCL says that the GPU is dead"))
        assert stay_in_service(cluster, node)
        assert client.receive() == []

        gpu_agents.nvml[node].lose(0)
        client.send(Look(job_id=job))
        seen: list[Seen] = []

        def heard() -> bool:
            seen.extend(message for message in client.receive() if isinstance(message, Seen))
            return any(message.drained for message in seen)

        cluster.until(heard, "word of the drain", DRAINED_S)
    cluster.cancel(job)
    cluster.wait_ended(job, 120)

    assert {message.incident for message in seen} == {gpu_agents.incidents(node)[0]["id"]}
    assert seen[0].action is Action.DRAIN_REBOOT
    assert is_drained(cluster, node)


def test_an_idle_agent_calls_no_slurm(cluster: Lab, agents: Agents) -> None:
    """Thousands of agents must not cost the controller anything."""
    node = cluster.node_names[0]
    agents.start(node)

    def asks_nothing() -> bool:
        before = _calls(cluster)
        time.sleep(3.0)
        return _calls(cluster) == before

    cluster.until(asks_nothing, "three seconds without a call, once it has begun", 60)


def _calls(lab: Lab) -> int:
    """Return how many requests about nodes slurmctld has served: each of ours asks about nodes."""
    text = lab.run("sdiag").stdout
    found = [line.split("count:")[1].split()[0] for line in text.splitlines() if "REQUEST_NODE_INFO" in line]
    return sum(map(int, found))
