"""`stepkeeper resume` of a run that the user's own batch script had started, on a real cluster."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from stepkeeper.core.exits import ExitCode
from tests.lab import Lab
from tests.lab.jobs import ENDED
from tests.lab.site import site_python
from tests.training import SMALL, Training

USER = "games"
STEPS = 60


@pytest.mark.campaign  # `stepkeeper resume` of a submitted run: test_submit_on_slurm
def test_a_run_of_the_users_own_batch_script_goes_on_by_one_word(lab: Lab) -> None:
    """The script is gone meanwhile; its arguments have blanks, and a setting was a variable."""
    training = Training(lab, name="own-script", user=USER)
    stepkeeper = site_python(USER).parent / "stepkeeper"
    script = training.work / "own-script.sh"
    command = [str(site_python(USER)), "-m", "stepkeeper_trainer.examples.train_lm", f"--steps={STEPS}",
        "--step-seconds-min=0.3", *SMALL]  # fmt: skip
    lines = [
        "#!/bin/bash",
        "#SBATCH --gres=gpu:1 --mem=2000 --cpus-per-task=1",
        'printf "%s|" "$@"; echo',
        f'exec {stepkeeper} run -- {shlex.join(command)} "$@"',
    ]
    script.write_text("\n".join(lines) + "\n")
    script.chmod(0o755)
    environment = {"STEPKEEPER_RUN_DIR": str(training.run_dir), "STEPKEEPER_POLICY_FAILURES_MAX": "7"}
    options = ["--job-name=own-script", "--nodes=1", f"--output={training.log}", "--time=17"]
    arguments = ["--retention", "newest 3, every 1000 steps"]
    job = training.job_id = lab.submit([script, *arguments], sbatch_args=options, user=USER, env=environment)

    def ask(*words: object):
        return lab.run(stepkeeper, *map(str, words), user=USER, cwd=Path("/"), check=False, timeout_s=120.0)

    def status() -> dict[str, Any]:
        return json.loads(ask("status", job, "--json").stdout)

    training.wait_step(3)
    training.until(lambda: status()["step"], "the first step in the status")
    seen = status()
    assert seen["total_steps"] == STEPS
    assert 0 < seen["progress"] < 1
    assert 0.2 < seen["pace_s"] < 30
    assert seen["done_at"] is not None
    assert seen["alive_at"] is not None
    stopped = ask("stop", job)
    assert stopped.returncode == 0, (stopped.stderr, training.story())
    assert f"to continue: stepkeeper resume {training.run_dir}" in stopped.stdout
    training.wait_end()
    script.unlink()

    shown = ask("resume", job, "--dry-run")
    assert shown.returncode == 0, shown.stderr
    for words in ("--time=00:17:00", "--job-name=own-script", "STEPKEEPER_POLICY_FAILURES_MAX=7"):
        assert words in shown.stdout, shown.stdout
    resumed = ask("resume", job)
    assert resumed.returncode == 0, (resumed.stderr, training.story())
    again = training.job_id = int(resumed.stdout.partition("job ")[2].rpartition(" is submitted")[0].split()[-1])
    training.wait_end()

    assert lab.job(again).state == "COMPLETED", training.story()
    assert lab.job(again).raw["TimeLimit"] == "00:17:00"
    assert training.exits() == [ExitCode.STOPPED, ExitCode.FINISHED], training.story()
    assert sorted(training.rows()) == list(range(1, STEPS + 1)), "each step once, in the same run directory"
    assert training.output().count("--retention|newest 3, every 1000 steps|") == 2, training.output()
    late = ask("resume", again)
    assert late.returncode == ExitCode.RUN_DIRECTORY
    assert f"this run has finished, at step {STEPS}" in late.stderr
    assert lab.job(again).state in ENDED
