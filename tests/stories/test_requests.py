"""People ask a run that is under way: `stepkeeper save`, `stepkeeper stop`."""

import json

import pytest

from stepkeeper.core.exits import ExitCode
from tests.lab import Lab
from tests.stories.test_first_hour import asked
from tests.training import Training, assert_complete


@pytest.mark.campaign
def test_saved_on_request_then_stopped_and_gone_on_by_another_job(lab: Lab, reference: Training) -> None:
    training = Training(lab, name="asked", every=1000, step_seconds=1.0).submit()
    training.wait_step(3)

    def ask(word: str, *more: str):
        command = (training.stepkeeper, word, training.run_dir, "--json", *more)
        return lab.run(*command, user=training.user, check=False, timeout_s=90.0)

    saved = ask("save")
    assert saved.returncode == 0, (saved.stderr, training.story())
    answer = json.loads(saved.stdout)
    assert answer["step"] in training.committed()
    assert not training.exits(), "it goes on"

    stopped = ask("stop")
    assert stopped.returncode == 0, (stopped.stderr, training.story())
    answer = json.loads(stopped.stdout)
    assert answer["exit_code"] == ExitCode.STOPPED
    assert answer["checkpoint_step"] == max(training.committed())
    training.wait_end()
    assert training.step() < training.steps, "it was stopped before its end"
    late = ask("save")
    assert "no supervisor works on this run now" in late.stderr
    why = asked(training, "explain", str(training.job_id))
    assert f"{training.user} asked to save and end (stepkeeper stop)" in why, why
    assert "who cancelled it" not in why
    assert f"{training.user} asks to save and end" in asked(training, "status", str(training.job_id))
    report = json.loads(asked(training, "report", str(training.run_dir), "--json"))
    assert [launch["ending"] for launch in report["launches"]] == ["stopped"], report["launches"]

    (training.run_dir / "submission.json").unlink()  # as if an older version had started it: Slurm still knows
    words = (training.stepkeeper, "resume", training.run_dir, "--json")
    shell = {"STEPKEEPER": str(training.stepkeeper)}
    resumed = lab.run(*words, user=training.user, env=shell, check=False, timeout_s=90.0)
    assert resumed.returncode == 0, (resumed.stderr, training.story())
    training.job_id = int(json.loads(resumed.stdout)["job"])
    training.wait_end()
    assert_complete(training, reference)
