"""A large step directory is verified by the nodes of the job together, on a real Slurm."""

from __future__ import annotations

from pathlib import Path

import pytest

from stepkeeper.core import events as on
from stepkeeper.core.state import Phase
from tests.lab import Lab
from tests.stories.acts import kill_watcher
from tests.stories.patience import hurry, kill_rank, patient

pytestmark = pytest.mark.slurm
LARGE = ("--width=256", "--layers=3")  # some 35 MB of state
SHARED = {"STEPKEEPER_VERIFY_MIB_PER_S": "4"}  # one node would take 9 s: nodes share it, slowly enough to interfere


def damage(step: Path) -> Path:
    """Change one byte in the middle of the largest file."""
    victim = max(step.glob("*.distcp"), key=lambda path: path.stat().st_size)
    with victim.open("r+b") as file:
        file.seek(victim.stat().st_size // 2)
        (value,) = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([value ^ 1]))
    return victim


@pytest.mark.campaign
def test_both_nodes_verify_and_neither_damage_nor_a_lost_watcher_is_missed(lab: Lab) -> None:
    """The newest step is damaged and one of the readers dies: the step before is verified and used all the same."""
    # the next one is not saved before the relaunch
    training = patient(lab, "shared", after=20, step_seconds=0.3, steps=30, script_args=LARGE, env=dict(SHARED))
    training.wait_step(21)
    training.until(lambda: 20 in training.committed(), "step 20")
    victim = damage(training.run_dir / "checkpoints" / "step_00000020")

    kill_rank(training)
    training.until(lambda: training.records()[-1].phase is Phase.STARTING, "the relaunch")
    hurry(training)
    kill_watcher(training)
    training.wait_end()

    assert lab.job(training.job_id).state == "COMPLETED", training.story()
    assert len(training.losses()) == training.steps
    assert [record.event.ok for record in training.events(on.StorageTested)] == [True]
    assert len(training.events(on.WatcherLost)) >= 1, "nothing was interfered with"
    first, second = (record.event for record in training.events(on.CheckpointChosen))
    assert (first.directory, first.readers) == (None, ())
    assert second.directory.endswith("step_00000010"), training.story()
    (skipped,) = second.skipped
    assert (skipped.directory, skipped.damaged) == ("step_00000020", True)
    assert victim.name in skipped.problem
    nodes = training.launches()[0]
    assert set(second.readers) == set(nodes), training.story()
    whole = sum(path.stat().st_size for path in (training.run_dir / "checkpoints" / "step_00000010").rglob("*.distcp"))
    assert second.bytes_read >= whole


@pytest.mark.campaign
def test_what_was_read_back_beside_training_is_not_read_again_at_a_relaunch(lab: Lab) -> None:
    """Both nodes read it past their page caches while training goes on; the relaunch then waits for no reading."""
    training = patient(
        lab, "read-back", "--read-back=newest",
        after=20, step_seconds=0.3, steps=30,  # the next one is not saved before the relaunch
        script_args=LARGE, env=dict(SHARED),
    )  # fmt: skip
    training.wait_event(on.CheckpointVerified, count=2)
    committed = [record.event.directory for record in training.events(on.CheckpointCommitted)]

    kill_rank(training)
    hurry(training)
    training.wait_end()

    assert lab.job(training.job_id).state == "COMPLETED", training.story()
    assert len(training.losses()) == training.steps
    nodes = set(training.launches()[0])
    read = [record.event for record in training.events(on.CheckpointVerified)]
    assert [(event.directory, event.ok, set(event.readers)) for event in read[:2]] == [
        (directory, True, nodes) for directory in committed[:2]
    ], training.story()
    _, second = (record.event for record in training.events(on.CheckpointChosen))
    assert second.directory.endswith(committed[1])
    assert (second.bytes_read, second.readers) == (0, ()), training.story()
