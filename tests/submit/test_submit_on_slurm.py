"""`stepkeeper submit` as an ordinary user on a real cluster: dry run, refusal, and a training to its end."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from stepkeeper.core.exits import ExitCode
from stepkeeper.run_store import journal
from tests.lab import Lab
from tests.lab.jobs import ENDED
from tests.lab.site import site_python
from tests.training import SMALL

USER = "games"


def submit(lab: Lab, *words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    command = site_python(USER).parent / "stepkeeper"
    return lab.run(command, "submit", *words, user=USER, cwd=lab.workdir(USER), check=check, timeout_s=180.0)


def ask(lab: Lab, *words: object, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Type a command, from a place that tells nothing of the run."""
    command = site_python(USER).parent / "stepkeeper"
    return lab.run(command, *map(str, words), user=USER, cwd=Path("/"), check=check, timeout_s=180.0)


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


def test_what_slurm_says_of_a_job_of_sbatch_is_shown_before_it_has_a_run(lab: Lab) -> None:
    job = lab.submit("exec true", sbatch_args=["--hold", "--array=3"], user=USER)
    try:
        for command in ("status", "events"):
            seen = ask(lab, command, f"{job}_3").stdout
            assert f"job {job}_3 is PENDING (JobHeldUser)" in seen, seen
        assert "no run directory found" in ask(lab, "status", "999999", check=False).stderr
    finally:
        lab.cancel(job)


@pytest.mark.campaign
def test_a_run_is_known_while_its_job_waits_can_be_stopped_there_and_is_submitted_again_as_it_was(lab: Lab) -> None:
    python = str(site_python(USER))
    done = submit(
        lab,
        "--gpus-per-node=1",
        "--sbatch=--mem=2000",
        "--sbatch=--cpus-per-task=1",
        "--sbatch=--begin=now+2hours",
        "--setup=export FROM_SETUP=yes",
        "--job-name=waits",
        "--",
        *(python, "-m", "stepkeeper_trainer.examples.train_lm", "--steps=4", *SMALL),
    )
    job = int(done.stdout.split()[1])
    run_dir = lab.workdir(USER) / "runs" / f"waits-{job}"
    assert f"Slurm says     job {job} is PENDING" in done.stdout

    seen = ask(lab, "status", job).stdout
    for words in (
        str(run_dir),
        "pending, for",
        f"job {job} is PENDING (BeginTime): expected to start in 1 h 5",
        f"{run_dir}/logs",
        f"{lab.workdir(USER)}/waits-{job}.log",
    ):
        assert words in seen, (words, seen)
    document = json.loads(ask(lab, "status", job, "--json").stdout)
    assert (document["phase"], document["queue"]["reason"]) == ("pending", "BeginTime")
    assert "pending (BeginTime)" in ask(lab, "status", "--all").stdout
    for command in ("events", "explain", "logs"):
        assert f"job {job} is PENDING (BeginTime)" in ask(lab, command, job).stdout, command
    busy = ask(lab, "resume", job, check=False)
    assert busy.returncode == ExitCode.RUN_BUSY
    assert "the run is not over" in busy.stderr
    save = ask(lab, "save", job, check=False)
    assert save.returncode == ExitCode.NOTHING_FOUND
    assert "nothing is running that could save" in save.stderr

    stopped = ask(lab, "stop", job).stdout
    assert f"job {job} waited in the queue, and nothing of the run was running: it is cancelled" in stopped
    assert lab.job(job).state == "CANCELLED"
    assert "gone before it started, for" in (seen := ask(lab, "status", job).stdout)
    assert f"stepkeeper resume {run_dir}" in seen

    shown = ask(lab, "resume", job, "--dry-run").stdout
    assert "| #SBATCH --begin=now+2hours" in shown
    resumed = ask(lab, "resume", job, "--sbatch=--begin=now", "--json").stdout
    again = int(json.loads(resumed)["job"])
    lab.until(lambda: lab.job(again).state in ENDED, "the end of the job", 240.0)
    assert lab.job(again).state == "COMPLETED", (lab.workdir(USER) / f"waits-{again}.log").read_text()
    workers = {record.job_id for record in journal.read(run_dir / "journal.jsonl")}
    assert workers == {again}, "it works in the same run directory"
    assert not (lab.workdir(USER) / "runs" / f"waits-{again}").exists()
    assert json.loads(ask(lab, "status", again, "--json").stdout)["total_steps"] == 4
