"""Unmodified scripts below `stepkeeper run --attach auto`: preempted by a real Slurm, and killed in a save."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest

from stepkeeper.core import events as on
from tests.frameworks import environments, playing
from tests.frameworks.test_attach import latest
from tests.lab import Lab
from tests.stories import acts
from tests.stories.test_campaign import release_urgent_jobs
from tests.training import Training

pytestmark = [pytest.mark.frameworks, pytest.mark.slurm]

STEPS, WITHIN_S = 1500, 500.0
SCRIPT = """
found=$("$1" checkpoints latest "$2" || true)
exec "$3" "$4" --out "$2" --losses "$5" --resume "$found" --steps {steps} --every 100000
"""
LOOP = """
if [ "$SLURM_PROCID" = 0 ] && [ "${{SLURM_RESTART_COUNT:-0}}" != 0 ] && mkdir "$1.killed" 2>/dev/null; then
    export LD_PRELOAD="$5" TEST_KILL="$6"
fi
exec "$2" "$3" --out "$1" --losses "$4" --resume "$STEPKEEPER_RESUME_FROM" --steps {steps} --every {every} --variant 2
"""


@pytest.fixture(scope="module")
def lab(lab_factory) -> Lab:
    return lab_factory(grace_time_s=60, kill_wait_s=10)


@pytest.mark.parametrize("script", ["names the checkpoint", "names none"])
def test_a_preempted_trainer_saves_at_the_notice_and_goes_on_from_there(
    script: str, lab: Lab, capsys: pytest.CaptureFixture[str]
) -> None:
    python = environments.require("huggingface")
    # as root: the Python below the cached environments may lie in a closed home directory
    name = f"huggingface-{script.replace(' ', '-')}"
    training = Training(lab, user="root", name=name, run_args=("--attach", "auto"), env={"OMP_NUM_THREADS": "1"})
    scripts, out, losses = (training.work / f"{name}-{each}" for each in ("scripts", "out", "losses"))
    shutil.copytree(playing.SCRIPTS, scripts)
    path = scripts / "huggingface_script.py"
    if script == "names none":  # `trainer.train(resume_from_checkpoint=None)` at each start
        training.run_args += ("--framework", "huggingface", "--checkpoint-dir", str(out))
        options = ("--out", str(out), "--losses", str(losses), "--steps", str(STEPS), "--every", "100000")
        training.command = (str(python), str(path), *options)
    else:
        account = [str(training.stepkeeper), str(out), str(python), str(path), str(losses)]
        training.command = ("bash", "-c", SCRIPT.format(steps=STEPS), "train", *account)
    training.submit()
    training.until(lambda: training.events(on.Progressed) or training.exits(), "a step")
    acts.preempt(training)
    saved = training.wait_event(on.CheckpointCommitted).event
    assert isinstance(saved, on.CheckpointCommitted)
    training.wait_attempt(1)
    release_urgent_jobs(lab)
    training.wait_end()

    assert saved.emergency, training.story()
    assert saved.framework == "huggingface"
    if script == "names none":  # its ranks say nothing new: they go on from where the supervisor says
        resumed = [record.event.step for record in training.events(on.CheckpointChosen) if record.attempt == 1]
    else:
        resumed = [record.event.resumed_step for record in training.events(on.RankHello) if record.attempt == 1]
    assert saved.step in resumed, training.story()
    assert lab.job(training.job_id).state == "COMPLETED", training.story()
    assert training.events(on.TrainingFinished), training.story()
    for rank in range(2):
        steps = [int(line.split()[0]) for line in Path(f"{losses}.{rank}").read_text().splitlines()]
        assert steps == list(range(1, STEPS + 1)), f"rank {rank} did a step twice, or none"
    assert latest(out, capsys)["chosen"]["step"] >= saved.step


@dataclass(frozen=True)
class Loop:
    """A script with a loop of its own, and the file in whose writing rank 0 is killed."""

    name: str
    environment: str
    steps: int
    killed_at: str


LOOPS = [
    Loop("accelerate", "huggingface", 3000, "checkpoint_2400/optimizer.bin"),
    Loop("deepspeed", "deepspeed", 2000, "global_step1600/mp_rank_00_model_states.pt"),
]


@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.name)
def test_a_loop_of_the_scripts_own_is_preempted_and_killed_in_a_save_and_its_losses_go_on(
    loop: Loop, lab: Lab, tmp_path: Path
) -> None:
    python = environments.require(loop.environment)
    training = Training(lab, user="root", name=loop.name, env={"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"})
    scripts, out, losses, shim = (training.work / f"{loop.name}-{each}" for each in ("scripts", "out", "losses", "so"))
    shutil.copytree(playing.SCRIPTS, scripts)
    shutil.copyfile(playing.shim(), shim)
    out.mkdir()
    script = scripts / f"{loop.name}_script.py"
    training.run_args = ("--attach", "auto", "--framework", loop.name, "--checkpoint-dir", str(out))
    account = [out, python, script, losses, shim, f"write:{out / loop.killed_at}"]
    commands = LOOP.format(steps=loop.steps, every=loop.steps // 5)
    training.command = ("bash", "-c", commands, "train", *map(str, account))
    training.submit()
    training.until(lambda: training.events(on.CheckpointCommitted) or training.exits(), "a save of the script's own")
    acts.preempt(training)
    training.wait_attempt(1, WITHIN_S)
    release_urgent_jobs(lab)
    training.wait_end(WITHIN_S)

    commits = [each.event for each in training.events(on.CheckpointCommitted)]
    saved = [each for each in commits if isinstance(each, on.CheckpointCommitted) and each.emergency]
    assert [each.framework for each in saved] == [loop.name], training.story()
    chosen = [each.event for each in training.events(on.CheckpointChosen)]
    steps = [each.step for each in chosen if isinstance(each, on.CheckpointChosen)]
    assert steps == [None, saved[0].step, loop.steps * 3 // 5], training.story()
    assert lab.job(training.job_id).state == "COMPLETED", training.story()
    assert Path(f"{out}.killed").exists(), training.story()
    with playing.warm(python, script.name, [loop.name], []) as framework:
        more = ["--steps", str(loop.steps), "--every", str(loop.steps), "--variant", "2"]
        assert framework.play(tmp_path / "out", tmp_path / "whole", arguments=more) == [0, 0]
    for rank in range(2):
        whole = playing.losses(tmp_path / "whole", rank)
        played = [line.split() for line in Path(f"{losses}.{rank}").read_text().splitlines()]
        numbers = [int(step) for step, _ in played]
        assert numbers[: saved[0].step + 1] == list(range(1, saved[0].step + 2)), (
            f"rank {rank} lost a step at the notice"
        )
        assert set(numbers) == set(range(1, loop.steps + 1))
        assert len(numbers) > loop.steps, "nothing was done again: it was not killed in its save"
        assert [row for row in played if whole[int(row[0])] != row[1]] == [], f"rank {rank} has other losses"
