"""What somebody types in the first hour with a run of his own: as an ordinary user, from anywhere on a real cluster."""

import json
import subprocess

import pytest

from stepkeeper.core import events as on
from stepkeeper.core.exits import ExitCode
from tests.lab import Lab
from tests.stories import acts
from tests.training import SMALL, Training, assert_complete

pytestmark = [pytest.mark.slurm, pytest.mark.campaign]
SCRIPT = "import runpy\n\nrunpy.run_module('stepkeeper_trainer.examples.train_lm', run_name='__main__')\n"


def test_a_run_is_followed_explained_and_found_and_an_edit_between_two_attempts_is_told(
    lab: Lab, reference: Training
) -> None:
    training = Training(lab, name="first-hour", step_seconds=0.5)
    script = _committed(training)
    training.command = (
        str(training.python), str(script), f"--steps={training.steps}", f"--seed={training.seed}",
        f"--checkpoint-every-steps={training.every}", f"--step-seconds-min={training.step_seconds}", *SMALL,
    )  # fmt: skip
    training.submit()
    training.wait_step(12)
    follow = subprocess.Popen(
        [training.stepkeeper, "logs", str(training.job_id), "--follow"],
        env=lab.environment(training.user),
        cwd="/",
        stdout=subprocess.PIPE,
        text=True,
        **lab.identity(training.user),
    )
    try:
        acts.kill_one(training, lambda line: script.name in line and "wrapper.py" not in line and " run " not in line)
        training.wait_event(on.LaunchBegan, count=2)
        training.wait_step(training.step() + 2)
        script.write_text(SCRIPT + "# an edit\n")
        lab.requeue(training.job_id)
        training.wait_end()
        followed, _ = follow.communicate(timeout=180)
    finally:
        follow.kill()
        follow.wait(60)

    assert_complete(training, reference)
    assert len(training.launches()) == 3, training.story()
    assert f"step {training.steps}" in followed, followed
    assert "code_changed" in training.output()
    assert "uncommitted changes" in training.output()

    assert f"users/{training.user}/first-hour" in asked(training, "status", "--all")
    assert json.loads(asked(training, "status", str(training.job_id), "--json"))["exit_code"] == ExitCode.FINISHED
    assert "the training is finished" in asked(training, "status", str(training.job_id))
    assert asked(training, "logs", str(training.job_id), "--failed") != ""
    assert asked(training, "logs", str(training.job_id), "--rank", "0") != ""
    assert "cause" in asked(training, "explain", str(training.job_id))
    killed = asked(training, "explain", str(training.run_dir), "--attempt", "0", "--launch", "0")
    assert "host_memory (a guess, 50 %" in killed, killed
    assert all(words in killed for words in ("SIGKILL", "next       launch 0.1 followed", "confirm    on ")), killed
    assert "signal 9" in asked(training, "events", str(training.run_dir))


def test_a_run_that_wants_no_other_code_does_not_go_on_with_an_edit(lab: Lab) -> None:
    training = Training(lab, name="same-code", step_seconds=0.3, steps=400, run_args=("--same-code",))
    script = _committed(training)
    training.command = (str(training.python), str(script), "--steps=400", "--step-seconds-min=0.3", *SMALL)
    training.submit()
    training.wait_step(3)
    script.write_text(SCRIPT + "# an edit\n")

    lab.requeue(training.job_id)
    training.wait_end()

    assert lab.job(training.job_id).exit_code == f"{ExitCode.CODE_CHANGED.value}:0", training.story()
    assert "bring it back" in training.output()


def _committed(training: Training):
    """A training script of the user's own, in a repository of his."""
    place = training.work / f"code-{training.name}"
    run = training.lab.run
    run("git", "init", "--quiet", place, user=training.user)
    script = place / "mine.py"
    script.write_text(SCRIPT)
    script.chmod(0o644)
    names = ("-c", "user.name=ada", "-c", "user.email=ada@example.org")
    run("git", "-C", place, "add", ".", user=training.user)
    run("git", "-C", place, *names, "commit", "--quiet", "-m", "first", user=training.user)
    return script


def asked(training: Training, *words: str) -> str:
    """What a command of ours says to the run's owner, who stands somewhere else."""
    return training.lab.run(training.stepkeeper, *words, user=training.user, cwd=training.lab.directory).stdout
