"""Unmodified scripts of other frameworks: killed in a save, requeued, and aborted in their exit after the last step."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest

from stepkeeper.core import events as on
from stepkeeper.core.exits import ExitCode
from tests.frameworks import environments
from tests.lab import Lab
from tests.stories import acts
from tests.stories.test_campaign import release_urgent_jobs
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


@dataclass(frozen=True)
class Case:
    """An unmodified script of a framework, and the checkpoint in whose save it dies."""

    framework: str
    script: str
    arguments: tuple[str, ...]
    torn: str
    option: str  # that places its checkpoints
    aborts: bool = False  # after the last step, which the checkpoint tells


CASES = (
    Case(
        "huggingface",
        "huggingface_trainer.py",
        ("--max_steps", "30", "--save_steps", "6", "--use_cpu", "True", "--ddp_backend", "gloo"),
        "checkpoint-12",
        "--output_dir",
        aborts=True,
    ),
    Case("lightning", "lightning_trainer.py", ("--steps", "30"), "step=12.ckpt", "--out"),
)


@pytest.mark.frameworks
@pytest.mark.campaign
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.framework)
def test_an_unmodified_script_loses_nothing_that_was_saved(lab: Lab, case: Case) -> None:
    """It is killed in its save of step 12, and requeued by an administrator; perhaps rank 0 aborts in its exit."""
    python, why = environments.python(case.framework)
    if python is None:
        pytest.skip(why)
    reference = begin(lab, case, "whole", python)
    reference.wait_end(600.0)
    assert lab.job(reference.job_id).state == "COMPLETED", reference.story()
    expected = losses(reference)
    assert set(expected) == set(range(1, 31)), reference.story()

    abort = {"TEST_ABORTS": "1"} if case.aborts else {}
    training = begin(lab, case, "killed", python, TEST_DIES_AT="12", TEST_STEP_S="0.4", **abort)
    training.until(lambda: 20 in losses(training), "step 20", 600.0)
    acts.requeue_by_admin(training)
    training.wait_attempt(1, 600.0)
    release_urgent_jobs(lab)
    training.wait_end(600.0)

    assert lab.job(training.job_id).state == "COMPLETED", training.story()
    assert training.exits()[-1] == ExitCode.FINISHED, training.story()
    assert chosen(training) == [None, 6, 18], training.story()
    assert case.torn in passed_over(training), training.story()
    assert losses(training) == expected, training.story()
    assert ("failed_after_last_step" in training.output()) == case.aborts, training.story()


def begin(lab: Lab, case: Case, name: str, python: Path, **env: str) -> Training:
    """Submit the script as root: the environment lies above that of the tests, which other users may not read."""
    training = Training(lab, name=f"{case.framework}-{name}", user="root")
    training.work.mkdir(exist_ok=True)
    script, out = place(training, case.script)
    training.command = (str(python), str(script), case.option, str(out), *case.arguments)
    training.env = {
        "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "",
        "TOKENIZERS_PARALLELISM": "false", **env,
    }  # fmt: skip
    return training.submit()


def losses(training: Training) -> dict[int, str]:
    """Return what rank 0 printed, the last word of each step."""
    path = training.work / f"out-{training.name}" / "losses-0"
    rows = path.read_text().splitlines() if path.exists() else []
    whole = rows if not rows or path.read_bytes().endswith(b"\n") else rows[:-1]
    return {int(step): loss for step, loss in (row.split() for row in whole)}
