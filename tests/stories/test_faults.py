"""A GPU that fails costs one launch, not the next three jobs: on a real Slurm, with an agent on every node."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import pytest

from stepkeeper.core import effects as do
from stepkeeper.core import events as on
from stepkeeper.slurm.client import REASON_PREFIX
from tests.lab import Lab
from tests.lab.agents import Agents
from tests.stories.acts import saving
from tests.training import Training, assert_complete

pytestmark = pytest.mark.slurm
STEP_SECONDS = 0.4  # on a busy machine the fault comes seconds after it is asked for
DELAY_S = 120.0  # of a requeue, where a site has set nothing
ALIKE = 1e-6  # of losses on another world size


@pytest.fixture
def agents(lab: Lab) -> Iterator[Agents]:
    with Agents(lab, nvml=True) as agents:
        yield agents
    mend(lab)


def mend(lab: Lab) -> None:
    """Leave the lab whole for the next story."""
    for job_id in lab.run("squeue", "--noheader", "--format=%i").stdout.split():
        lab.run("scancel", job_id, check=False)

    def whole() -> bool:
        found = lab.nodes()  # none while slurmctld does not answer
        for node in found.values():
            if "DRAIN" in node.state:
                lab.run("scontrol", "update", f"NodeName={node.name}", "State=RESUME", check=False)
        return bool(found) and all(node.is_up for node in found.values())

    lab.until(whole, "idle nodes", 120)


def start(
    lab: Lab,
    agents: Agents | None,
    name: str,
    *,
    nodes: int,
    options: tuple[str, ...] = (),
    step_seconds: float = STEP_SECONDS,
) -> Training:
    """Start a training beside the agents, and wait until some steps are done and some of them saved."""
    env = {"STEPKEEPER_AGENT_SOCKET": str(agents.directory / "%N" / "run" / "agent.sock")} if agents else {}
    training = Training(lab, name=name, nodes=nodes, step_seconds=step_seconds, run_args=options, env=env).submit()
    training.wait_step(13)
    return training


def drained(lab: Lab) -> dict[str, str]:
    """Nodes that Stepkeeper drained, and why.  Slurm drains some itself ("Kill task failed") on a busy machine."""
    found = {name: node for name, node in lab.nodes().items() if node.reason.startswith(REASON_PREFIX)}
    return {name: node.reason for name, node in found.items() if "DRAIN" in node.state}


def faults(training: Training) -> list[on.NodeFaulted]:
    return [record.event for record in training.events(on.NodeFaulted)]


def test_a_lost_gpu_costs_one_launch_and_its_node_is_drained(lab: Lab, agents: Agents, reference: Training) -> None:
    """The spare takes the node's place; the node is given back, so that it can be repaired while the run goes on."""
    agents.start()
    training = start(lab, agents, "spare", nodes=3, options=("--spares=1",))
    (first,) = training.launches()
    bad = next(node for node in first if node != lab.job(training.job_id).batch_host)

    agents.inject(bad, 79)
    training.wait_event(on.NodeFaulted)
    training.until(lambda: len(training.launches()) == 2, "the next launch")
    training.until(lambda: bad not in lab.job(training.job_id).nodes, "the node to be given back, beside the launch")
    training.wait_end()

    assert_complete(training, reference)
    assert [record.event.attempt for record in training.events(on.AttemptStarted)] == [0], training.story()
    assert bad not in training.launches()[1]
    assert len(training.launches()[1]) == len(first)
    pci, uuid = agents.pci(bad), agents.uuid(bad)
    assert list(drained(lab)) == [bad]
    assert drained(lab)[bad].startswith(f"stepkeeper: XID 79 GPU {pci} ({uuid}) ")
    assert training.records()[-1].failures == 0, "a fault of a node is no failure of the training"
    told = f"XID 79 on {pci} {uuid} counts for this job: the driver does not say where GPU "  # there is none here
    assert told in training.log.read_text()


@pytest.mark.campaign
def test_without_a_spare_the_world_shrinks_where_that_is_allowed(lab: Lab, agents: Agents, reference: Training) -> None:
    agents.start()
    training = start(lab, agents, "shrink", nodes=2, options=("--min-nodes=1",))
    batch = lab.job(training.job_id).batch_host
    (bad,) = [node for node in training.launches()[0] if node != batch]

    agents.inject(bad, 79)
    training.wait_end()

    assert training.launches()[1:] == [(batch,)], training.story()
    losses, expected = training.losses(), reference.losses()
    assert losses.keys() == expected.keys()
    different = [step for step in losses if not math.isclose(float(losses[step]), float(expected[step]), rel_tol=ALIKE)]
    assert not different, training.story()
    assert "the launch shrinks to 1" in training.output()


@pytest.mark.campaign
def test_on_the_batch_node_the_run_goes_on_beside_it(lab: Lab, agents: Agents, reference: Training) -> None:
    """The supervisor lives there: its GPUs are used no more, but the node cannot be given back."""
    agents.start()
    training = start(lab, agents, "batch-node", nodes=3, options=("--spares=1",))
    bad = lab.job(training.job_id).batch_host
    assert bad in training.launches()[0]

    agents.inject(bad, 79)
    training.wait_end()

    assert_complete(training, reference)
    assert bad not in training.launches()[1]
    assert list(drained(lab)) == [bad]


@pytest.mark.campaign
def test_during_a_checkpoint_no_verified_step_is_lost(lab: Lab, agents: Agents, reference: Training) -> None:
    agents.start()
    training = start(lab, agents, "during-save", nodes=3, options=("--spares=1",))
    bad = next(node for node in training.launches()[0] if node != lab.job(training.job_id).batch_host)

    saving(training)
    agents.inject(bad, 79)
    training.wait_end()

    assert_complete(training, reference)
    assert bad not in training.launches()[1]


@pytest.mark.campaign
def test_an_observing_agent_tells_the_job_and_training_goes_on(lab: Lab, agents: Agents, reference: Training) -> None:
    """Mode `observe` changes nothing: the launch, the node and the losses are those of a run without an agent."""
    for node in lab.node_names:
        agents.configure(node, mode="observe")
    agents.start()
    training = start(lab, agents, "observed", nodes=2)
    (nodes,) = training.launches()
    bad = next(node for node in nodes if node != lab.job(training.job_id).batch_host)

    agents.inject(bad, 79)
    told = training.wait_event(on.NodeFaulted)
    training.wait_end()

    assert_complete(training, reference)
    assert training.launches() == [nodes], training.story()
    assert not drained(lab)
    assert [(each.node, each.action, each.leave) for each in faults(training)] == [(bad, "drain_reboot", False)], told
    assert "the node agent only observes" in training.output()


@pytest.mark.campaign
def test_two_nodes_at_once_are_left_and_the_breaker_lets_one_be_drained(
    lab: Lab, agents: Agents, reference: Training
) -> None:
    """What hits several nodes may be the fabric or the job: the drains stop, the job goes on where it can."""
    for node in lab.node_names:
        agents.configure(node, breaker={"nodes_min": 1})
    agents.start()
    training = start(lab, agents, "two-at-once", nodes=4, options=("--spares=2",))
    batch = lab.job(training.job_id).batch_host
    bad = [node for node in lab.node_names if node != batch][:2]

    for node in bad:
        agents.inject(node, 79)
    training.wait_end()

    assert_complete(training, reference)
    assert not set(bad) & set(training.launches()[-1])
    lab.until(lambda: len(drained(lab)) == 1, "one drained node", 120)
    assert set(drained(lab)) < set(bad)
    refused = [node for node in bad if agents.events(node, "alarm")]
    assert len(refused) == 1


@pytest.mark.campaign
def test_a_program_fault_keeps_its_node(lab: Lab, agents: Agents, reference: Training) -> None:
    """XID 31 is a bad access of the program: it explains the dead rank, and drains nothing."""
    agents.start()
    training = start(lab, agents, "program-fault", nodes=2, step_seconds=0.5)  # its burst is waited for
    node = next(node for node in training.launches()[0] if node != lab.job(training.job_id).batch_host)

    agents.inject(node, 31)
    training.wait_event(on.NodeFaulted)
    training.wait_end()

    assert_complete(training, reference)
    assert [fault.leave for fault in faults(training)] == [False]
    assert len(training.launches()) == 1
    assert not drained(lab)


@pytest.mark.campaign  # `tests/supervisor/test_own_gpus.py` has the rule
def test_a_fault_of_a_gpu_that_the_job_does_not_hold_does_not_stop_it(lab: Lab, agents: Agents) -> None:
    """It runs on CPUs beside a job with GPUs: the node is drained, and this job has no reason to leave it."""
    agents.start()
    socket = str(agents.directory / "%N" / "run" / "agent.sock")
    training = Training(
        lab,
        name="no-gpus",
        nodes=1,
        steps=20,
        step_seconds=STEP_SECONDS,
        sbatch_args=("--gres=none",),
        env={"STEPKEEPER_AGENT_SOCKET": socket},
    ).submit()
    training.wait_step(5)
    (node,) = training.launches()[0]

    agents.inject(node, 79)
    lab.wait_node(node, "DRAIN")
    training.wait_end()

    assert len(training.launches()) == 1
    assert not faults(training)
    assert "concerns other jobs, and this one continues: the job holds no GPU" in training.log.read_text()


@pytest.mark.campaign
def test_without_an_agent_the_watcher_sees_the_lost_gpu(lab: Lab, reference: Training, agents: Agents) -> None:
    """What an ordinary user's process may see is enough to leave the node and to stay away from it."""
    env = {"FAKE_NVML": str(agents.directory / "%N" / "nvml"), "STEPKEEPER_AGENT_SOCKET": "/nonexistent/%N"}
    for directory in (agents.directory, *(agents.directory / node for node in lab.node_names)):
        directory.chmod(0o755)  # the job's processes pass through
    library = next(iter(agents.nvml.values())).environment()["LD_LIBRARY_PATH"]
    training = Training(
        lab, name="no-agent", step_seconds=STEP_SECONDS, env={**env, "LD_LIBRARY_PATH": library}
    ).submit()
    training.wait_step(13)
    bad = next(node for node in training.launches()[0] if node != lab.job(training.job_id).batch_host)

    agents.nvml[bad].xid(0, 79)
    training.wait_attempt(1)
    training.wait_end()

    assert_complete(training, reference)
    assert all(bad not in nodes for nodes in training.launches()[1:])
    assert not drained(lab)


@pytest.mark.campaign
def test_a_requeued_job_does_not_wait_for_slurms_delay(lab_factory: Callable[..., Lab]) -> None:
    """With production's credential lifetime Slurm would keep the job for two minutes."""
    lab = lab_factory(nodes=2, grace_time_s=20, kill_wait_s=10, cred_expire_s=None)
    with Agents(lab) as own:
        own.start()
        training = start(lab, own, "expedited", nodes=2)
        lab.preempt(training.job_id)
        assert "cred_expire" not in lab.run("scontrol", "show", "config").stdout, "Slurm waits for its default, 120 s"
        training.wait_event(on.RequeueAnswered)
        lab.until(lambda: lab.job(training.job_id).state == "PENDING", "the requeue", 120)
        for urgent in lab.run("squeue", "--noheader", "--name=urgent", "--format=%i").stdout.split():
            lab.release(int(urgent))
        training.wait_attempt(1)
        training.wait_end()

    requeued_at = training.events(on.RequeueAnswered)[0].event.at
    assert training.events(on.AttemptStarted)[1].event.at < requeued_at + DELAY_S - 5, training.story()


@pytest.mark.campaign
def test_a_spare_that_fails_stops_nothing(lab: Lab, agents: Agents, reference: Training) -> None:
    agents.start()
    training = start(lab, agents, "bad-spare", nodes=3, options=("--spares=1",))
    (spare,) = set(lab.job(training.job_id).nodes) - set(training.launches()[0])

    agents.inject(spare, 79)
    training.wait_event(on.NodeFaulted)
    training.wait_end()

    assert_complete(training, reference)
    assert len(training.launches()) == 1, training.story()
    assert not [record for record in training.records() if any(isinstance(e, do.KillRanks) for e in record.effects)]
