"""`stepkeeper submit` as an ordinary user on a real cluster: dry run, refusal, and a training to its end."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from stepkeeper.core.exits import ExitCode
from stepkeeper.store import journal
from tests.lab import Lab
from tests.lab.jobs import ENDED
from tests.lab.site import site_python
from tests.training import SMALL

USER = "games"


def submit(lab: Lab, *words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    command = site_python(USER).parent / "stepkeeper"
    return lab.run(command, "submit", *words, user=USER, cwd=lab.workdir(USER), check=check, timeout_s=180.0)


def test_a_dry_run_prints_the_script_and_submits_nothing(lab: Lab) -> None:
    done = submit(lab, "--dry-run", "-N", "2", "--spares", "1", "--set", "policy.leave_within_s=7", "--", "true")
    assert "#SBATCH --nodes=2" in done.stdout
    assert done.stdout.rstrip().endswith("run --spares 1 --set policy.leave_within_s=7.0 -- true")
    assert not lab.run("squeue", "--noheader", "--user", USER, "--name", "true").stdout


def test_a_job_that_slurm_cannot_run_is_refused_before_it_is_submitted(lab: Lab) -> None:
    done = submit(lab, "-N", "999", "--", "true", check=False)
    assert done.returncode != 0
    assert "Slurm refuses the job" in done.stderr
    assert not lab.run("squeue", "--noheader", "--user", USER, "--name", "true").stdout


def test_a_setting_that_the_supervisor_would_refuse_is_refused_here(lab: Lab) -> None:
    done = submit(lab, "--set", "polcy.leave_within_s=7", "--", "true", check=False)
    assert done.returncode != 0
    assert "polcy.leave_within_s" in done.stderr


def test_a_run_directory_that_cannot_be_made_is_refused_here(lab: Lab) -> None:
    done = submit(lab, "--run-dir=no/such/place", "--", "true", check=False)
    assert done.returncode != 0
    assert f"its parent {lab.workdir(USER)}/no/such does not exist" in done.stderr


def test_several_partitions_are_looked_at_and_each_must_be_there(lab: Lab) -> None:
    assert "#SBATCH --partition=train,urgent" in submit(lab, "--dry-run", "-p", "train,urgent", "--", "true").stdout
    done = submit(lab, "--dry-run", "-p", "train,nowhere", "--", "true", check=False)
    assert done.returncode == ExitCode.USAGE
    assert "no partition 'nowhere' here; there are: train, urgent" in done.stderr


def test_a_training_is_submitted_and_finishes(lab: Lab) -> None:
    """Meanwhile a second job for it is told who has the run, and afterwards that there is nothing left to do."""
    python = str(site_python(USER))
    done = submit(
        lab,
        "--json",
        "--gpus-per-node=1",
        "--sbatch=--mem=2000",
        "--sbatch=--cpus-per-task=1",
        "--run-dir=%x-%j",
        "--setup=export FROM_SETUP=yes",
        "--",
        *(python, "-m", "stepkeeper_trainer.examples.train_lm", "--steps=4", *SMALL),
    )
    answer = json.loads(done.stdout)
    job, run_dir = answer["job"], Path(answer["run_dir"])
    lab.until((run_dir / "lease.json").exists, "the lease", 120.0)
    meanwhile = submit(lab, "--dry-run", f"--run-dir={run_dir}", "--", "true", check=False)
    lab.until(lambda: lab.job(job).state in ENDED, "the end of the job", 240.0)
    assert lab.job(job).state == "COMPLETED", (lab.workdir(USER) / f"train_lm-{job}.log").read_text()
    assert run_dir == lab.workdir(USER) / f"train_lm-{job}"
    assert f"job {job} works on this run" in meanwhile.stderr or "has finished" in meanwhile.stderr
    again = submit(lab, f"--run-dir={run_dir}", "--", "true", check=False)
    assert again.returncode == ExitCode.RUN_DIRECTORY
    assert "this run has finished, at step 4" in again.stderr
    assert list(journal.read(run_dir / "journal.jsonl")), "the run directory is where it was said to be"
