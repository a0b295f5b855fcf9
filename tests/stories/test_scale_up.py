"""A world that shrank grows back, in its allocation or by a requeue, and no loss shows it: on a real Slurm."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator

import pytest

from stepkeeper.core import events as on
from tests.lab import Lab
from tests.lab.agents import Agents
from tests.stories.test_faults import ALIKE, mend, start
from tests.training import SMALL, Training

pytestmark = [pytest.mark.slurm, pytest.mark.campaign]
STEP_SECONDS = 0.4
AT_A_CHECKPOINT = ("--min-nodes=1", "--grow-back=checkpoint")


@pytest.fixture
def agents(lab: Lab) -> Iterator[Agents]:
    with Agents(lab, nvml=True) as agents:
        yield agents
    mend(lab)


def assert_alike(training: Training, reference: Training) -> None:
    """Every step was done, none twice, and the losses are those of the uninterrupted run but for the order of sums."""
    losses, expected = training.losses(), reference.losses()
    assert losses.keys() == expected.keys(), training.story()
    different = [step for step in losses if not math.isclose(float(losses[step]), float(expected[step]), rel_tol=ALIKE)]
    assert not different, training.story()
    tokens = {step: row["tokens"] for step, row in training.rows().items()}
    assert tokens == {step: row["tokens"] for step, row in reference.rows().items()}


def steps_done(training: Training) -> list[int]:
    """The steps of metrics.csv as they were done, those that were done twice twice."""
    with (training.run_dir / "metrics.csv").open(newline="") as file:
        return [int(row["step"]) for row in csv.DictReader(file) if row["loss"]]


def test_a_node_that_is_fit_again_takes_part_after_the_next_checkpoint(
    lab: Lab, agents: Agents, reference: Training
) -> None:
    """It failed its check at the start, was kept, and looked at again beside training; no step is done twice."""
    for directory in (agents.directory, *(agents.directory / node for node in lab.node_names)):
        directory.chmod(0o755)  # the job's processes pass through
    library = next(iter(agents.nvml.values())).environment()["LD_LIBRARY_PATH"]
    env = {
        "FAKE_NVML": str(agents.directory / "%N" / "nvml"),
        "LD_LIBRARY_PATH": library,
        "STEPKEEPER_AGENT_SOCKET": "/nonexistent/%N",
    }
    good, bad = lab.node_names[:2]
    agents.nvml[bad].count(0)
    others = lab.submit("sleep 600", sbatch_args=["-N2", f"--exclude={good},{bad}"])  # no other node is idle
    lab.until(lambda: len(lab.job(others).nodes) == 2, "the job on the other nodes", 60.0)
    training = Training(
        lab,
        name="grows",
        step_seconds=4 * STEP_SECONDS,  # the pause between two looks grows with the time that the start takes
        run_args=(*AT_A_CHECKPOINT, "--set=policy.grow_idle_s=10"),
        sbatch_args=(f"--nodelist={good},{bad}",),
        env=env,
    ).submit()
    training.wait_step(2)

    agents.nvml[bad].count(1)
    training.wait_end()
    lab.cancel(others)

    assert training.launches() == [(good,), (good, bad)], training.story()
    assert_alike(training, reference)
    assert steps_done(training) == list(range(1, training.steps + 1))
    assert len(training.events(on.AttemptStarted)) == 1
    assert training.records()[-1].failures == 0


def test_nodes_that_were_given_back_return_by_a_requeue_once_others_are_idle(
    lab: Lab, agents: Agents, reference: Training
) -> None:
    """The bad one is drained, and Slurm has two more like it; the requeue asks for as many as the job was sent with."""
    agents.start()
    often = ("--set=policy.grow_idle_s=1",)
    training = start(lab, agents, "regrows", nodes=2, options=(*AT_A_CHECKPOINT, *often), step_seconds=STEP_SECONDS)
    batch = lab.job(training.job_id).batch_host
    (bad,) = [node for node in training.launches()[0] if node != batch]

    agents.inject(bad, 79)
    training.wait_attempt(1)
    training.wait_end()

    launches = training.launches()
    assert launches[1] == (batch,), training.story()
    assert len(launches) == 3, training.story()
    assert len(launches[2]) == 2
    assert bad not in launches[2]
    assert_alike(training, reference)


def test_an_elastic_torchrun_goes_on_with_the_nodes_that_are_left(
    lab: Lab, agents: Agents, reference: Training
) -> None:
    """Its range tells how small the world may get, and no rendezvous waits for the node that is gone."""
    agents.start()
    script = (
        "-m", "stepkeeper_trainer.examples.train_lm", f"--steps={reference.steps}", f"--seed={reference.seed}",
        f"--checkpoint-every-steps={reference.every}", f"--step-seconds-min={STEP_SECONDS}", *SMALL,
    )  # fmt: skip
    torchrun = Training(lab).python.with_name("torchrun")
    training = Training(
        lab,
        name="elastic-line",
        command=(str(torchrun), "--nnodes=1:2", "--rdzv-backend=c10d", *script),
        env={"STEPKEEPER_AGENT_SOCKET": str(agents.directory / "%N" / "run" / "agent.sock")},
    ).submit()
    training.wait_step(13)
    batch = lab.job(training.job_id).batch_host
    (bad,) = [node for node in training.launches()[0] if node != batch]

    agents.inject(bad, 79)
    training.wait_end()

    assert training.launches()[1:] == [(batch,)], training.story()
    assert len(training.events(on.AttemptStarted)) == 1
    assert_alike(training, reference)
