"""A run by way of the nodes' own disks: what befalls it costs no step that a disk had, and no byte."""

import pwd
from pathlib import Path

import pytest

from stepkeeper.core import events as on
from stepkeeper.core import reasons as because
from tests.lab import Lab
from tests.stories.acts import kill_rank, preempt
from tests.training import Training, assert_complete

INTERVAL = 2  # steps from one snapshot to the next
SLOW_MB_PER_S = 0.02  # shared storage takes several seconds for what a node's disk takes at once


def submitted(lab: Lab, name: str, **env: str) -> Training:
    local = lab.workdir("games") / "disks" / "%N"
    return Training(
        lab,
        name=name,
        steps=40,
        step_seconds=0.6,
        env={"STEPKEEPER_LOCAL_TIER": str(local), **env},
    ).submit()


def said(training: Training, event: str) -> list[str]:
    """The lines of one event in the logs of all ranks, in the order of launches and nodes."""
    logs = sorted(training.run_dir.glob("logs/*/*/*.log"))
    return [line for path in logs for line in path.read_text(errors="replace").splitlines() if event in line]


@pytest.mark.slurm
@pytest.mark.campaign
def test_a_lost_rank_and_a_preemption_go_on_from_the_nodes_disks_to_the_last_bit(lab: Lab, reference: Training) -> None:
    training = submitted(lab, "by-disks")
    training.wait_step(13)
    kill_rank(training)
    training.wait_event(on.CheckpointChosen, count=2)
    training.wait_step(23)
    preempt(training)
    training.until(
        lambda: not lab.job(training.job_id).nodes or training.events(on.AttemptStarted)[1:],
        "the nodes to be given back",
    )
    for job_id in lab.run("squeue", "--noheader", "--name=urgent", "--format=%i").stdout.split():
        lab.release(int(job_id))
    training.wait_end()

    assert_complete(training, reference)
    assert lab.job(training.job_id).state == "COMPLETED", training.story()
    disks = lab.workdir("games") / "disks"
    nodes = {node for launch in training.launches() for node in launch}
    assert {path.name for path in disks.iterdir()} == nodes, "each node has a disk of its own"
    for node in nodes:
        assert list((disks / node).glob(f"{training.name}.*/checkpoints/step_*/MANIFEST.json")), (
            node,
            training.story(),
        )
    assert training.committed()[-1] == training.steps, training.story()


@pytest.mark.slurm
@pytest.mark.campaign
def test_a_step_that_only_the_nodes_disks_have_is_gone_on_from_and_said_so(lab: Lab, reference: Training) -> None:
    training = submitted(lab, "newer-on-disks", STEPKEEPER_COPY_RATE=str(SLOW_MB_PER_S))
    training.until(lambda: any("step=20" in line for line in said(training, "held_locally")), "step 20 on the disks")
    kill_rank(training)
    training.wait_event(on.CheckpointChosen, count=2)
    chosen = training.events(on.CheckpointChosen)[1].event
    training.until(lambda: said(training, "step_brought"), "a step of the nodes' disks")
    training.wait_end()

    assert (chosen.step or 0) < 20, training.story()
    reasons = [reason for record in training.records() for reason in record.reasons]
    assert [each.step for each in reasons if isinstance(each, because.ResumedElsewhere)] == [20], training.story()
    assert "step=20" in said(training, "step_brought")[0], training.story()
    assert_complete(training, reference)


@pytest.mark.campaign
@pytest.mark.slurm
def test_a_killed_rank_costs_one_interval_of_snapshots_and_memory_is_given_back(lab: Lab, reference: Training) -> None:
    """Saves are far apart: what is done again, the nodes' memory decides."""
    training = submitted(lab, "in-memory", STEPKEEPER_LOCAL_TIER="", STEPKEEPER_SNAPSHOT_EVERY=f"{INTERVAL} steps")
    training.until(lambda: any("step=16" in line for line in said(training, "snapshot_held")), "a snapshot of step 16")
    kill_rank(training)
    training.wait_event(on.CheckpointChosen, count=2)
    done = training.step()
    training.wait_end()

    chosen = training.events(on.CheckpointChosen)[1].event
    assert chosen.step == 10, training.story()
    reasons = [reason for record in training.records() for reason in record.reasons]
    [resumed] = [each.step for each in reasons if isinstance(each, because.ResumedElsewhere)]
    assert resumed == 16, training.story()
    assert done - resumed <= INTERVAL, training.story()
    assert not said(training, "step_brought"), "no byte of it goes through shared storage"
    hellos = [record.event for record in training.events(on.RankHello)]
    assert [each.resumed_step for each in hellos if each.in_memory] == [16], training.story()
    assert 17 in training.committed(), "what only memory had is saved with the next step"
    assert_complete(training, reference)
    owner = pwd.getpwnam(training.user).pw_uid
    left = list(Path(f"/dev/shm/stepkeeper-{owner}").glob(f"{training.name}.*"))
    assert not left, "the run has ended"
