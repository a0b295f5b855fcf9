"""An unmodified script of Hugging Face's Trainer below `stepkeeper run --attach auto`, preempted by a real Slurm."""

from __future__ import annotations

import shutil

import pytest

from stepkeeper.core import events as on
from tests.frameworks import environments, playing
from tests.frameworks.test_attach import latest
from tests.lab import Lab
from tests.stories import acts
from tests.training import Training

pytestmark = [pytest.mark.frameworks, pytest.mark.slurm]

STEPS = 1500
SCRIPT = """
found=$("$1" checkpoints latest "$2" || true)
exec "$3" "$4" --out "$2" --losses "$5" --resume "$found" --steps {steps} --every 100000
"""


@pytest.fixture(scope="module")
def lab(lab_factory) -> Lab:
    return lab_factory(grace_time_s=60, kill_wait_s=10)


def test_a_preempted_trainer_saves_at_the_notice_and_goes_on_from_there(
    lab: Lab, capsys: pytest.CaptureFixture[str]
) -> None:
    python, why = environments.python("huggingface")
    if python is None:
        pytest.skip(why)
    # as root: the Python below the cached environments may lie in a closed home directory
    training = Training(
        lab, user="root", name="huggingface", run_args=("--attach", "auto"), env={"OMP_NUM_THREADS": "1"}
    )
    scripts, out, losses = (training.work / name for name in ("scripts", "out", "losses"))
    shutil.copytree(playing.SCRIPTS, scripts)
    account = [str(training.stepkeeper), str(out), str(python), str(scripts / "huggingface_script.py"), str(losses)]
    training.command = ("bash", "-c", SCRIPT.format(steps=STEPS), "train", *account)
    training.submit()
    training.until(lambda: training.events(on.Progressed) or training.exits(), "a step")
    acts.preempt(training)
    saved = training.wait_event(on.CheckpointCommitted).event
    assert isinstance(saved, on.CheckpointCommitted)
    training.wait_attempt(1)
    training.wait_end()

    assert saved.emergency, training.story()
    assert saved.framework == "huggingface"
    resumed = [record.event.resumed_step for record in training.events(on.RankHello) if record.attempt == 1]
    assert saved.step in resumed, training.story()
    assert lab.job(training.job_id).state == "COMPLETED", training.story()
    assert training.events(on.TrainingFinished), training.story()
    for rank in range(2):
        steps = [int(line.split()[0]) for line in (training.work / f"losses.{rank}").read_text().splitlines()]
        assert steps == list(range(1, STEPS + 1)), f"rank {rank} did a step twice, or none"
    assert latest(out, capsys)["chosen"]["step"] >= saved.step
