"""A script that saves as Hugging Face's Trainer does: killed in a save, and aborted in its exit after the last step."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from stepkeeper.core import events as on
from stepkeeper.core.exits import ExitCode
from tests.lab import Lab
from tests.training import Training

pytestmark = pytest.mark.slurm
SCRIPTS = Path(__file__).parent / "scripts"


def place(training: Training, name: str) -> tuple[Path, Path]:
    """Return a script where the user can read it, and a directory that it can write."""
    script, out = training.work / name, training.work / f"out-{training.name}"
    shutil.copyfile(SCRIPTS / name, script)
    script.chmod(0o644)
    out.mkdir(mode=0o777)
    out.chmod(0o777)
    return script, out


def chosen(training: Training) -> list[int | None]:
    """Return the steps that launches were to begin from."""
    events = [record.event for record in training.events(on.CheckpointChosen)]
    return [event.step for event in events if isinstance(event, on.CheckpointChosen)]


def passed_over(training: Training) -> set[str]:
    events = [record.event for record in training.events(on.CheckpointChosen)]
    return {each.directory for event in events if isinstance(event, on.CheckpointChosen) for each in event.skipped}


def test_a_script_killed_in_a_save_resumes_before_it_and_an_abort_after_the_last_step_is_its_end(lab: Lab) -> None:
    training = Training(lab, name="tiny-trainer")
    script, out = place(training, "tiny_trainer.py")
    training.command = (str(training.python), str(script), "--output_dir", str(out))

    training.submit().wait_end()

    assert lab.job(training.job_id).state == "COMPLETED", training.story()
    assert training.exits() == [ExitCode.FINISHED], training.story()
    assert chosen(training) == [None, 5], training.story()
    assert "checkpoint-10" in passed_over(training), training.story()
    begins = [row.split() for row in (out / "rows-0").read_text().splitlines() if row.startswith("begins")]
    assert [row[1:] for row in begins] == [["0"], ["5", str(out / "checkpoint-5")]], training.story()
    rows = dict(row.split() for row in (out / "rows-0").read_text().splitlines() if row[0].isdigit())
    x, expected = 1, {}
    for step in range(1, 21):
        x = (x * 1103515245 + 12345) % 2**31
        expected[str(step)] = str(x)
    assert rows == expected
    state = json.loads((out / "checkpoint-20" / "trainer_state.json").read_text())
    assert state["global_step"] == 20
    output = training.output()
    assert "framework_recognized" in output, output
    assert "failed_after_last_step" in output, output
