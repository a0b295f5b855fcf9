"""What a start costs, and how often Slurm is asked: `python -m tests.bench_start [--repeats 3]` (root, Slurm).

A job on 16 nodes from a cold page cache: batch script to supervisor to all watchers.  `stepkeeper submit` of the
reference training on two nodes, up to its first step.  Then a training of which a rank is killed, and which is
preempted: every call of a Slurm command is counted, idle and for each of the two.
"""

import argparse
import json
import os
import time
from pathlib import Path

from stepkeeper.core import events as on
from tests.lab import Lab, LabOptions
from tests.measuring import print_medians
from tests.training import SMALL, Training

NODES = 16
COUNTED = ("scontrol", "scancel", "squeue", "sinfo", "sacct", "sbatch", "srun")
IDLE_S = 120.0  # twice the fallback's shortest pause
HOUR_S = 3600.0
WITHIN_S = 300.0  # for what this machine does meanwhile


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure starts and Slurm calls on a lab cluster.")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    found: dict[str, list[float]] = {}
    with Lab(LabOptions(nodes=NODES, gpus=1, cpus=2)) as lab:
        for repeat in range(options.repeats):
            for cold in (True, False):
                for name, value in start(lab, f"start-{repeat}-{cold}", cold=cold).items():
                    found.setdefault(name, []).append(value)
            for name, value in first_step(lab, f"first-step-{repeat}").items():
                found.setdefault(name, []).append(value)
        for name, value in calls(lab).items():
            found.setdefault(name, []).append(value)
    print_medians(found)


def start(lab: Lab, name: str, *, cold: bool) -> dict[str, float]:
    """Submit a job that trains nothing, and look how long it takes until every watcher answers."""
    training = Training(lab, name=name, nodes=NODES, command=("bash", "-c", "sleep 600"))
    assert training.stepkeeper.exists(), "the user's environment is made before the cache is dropped"
    if cold:
        os.sync()
        Path("/proc/sys/vm/drop_caches").write_text("3")
    began = time.time()
    training.submit()
    training.until(lambda: len(training.events(on.WatcherReady)) >= NODES, f"{NODES} watchers")
    started = training.events(on.AttemptStarted)[0].event.at
    ready = [record.event.at for record in training.events(on.WatcherReady)]
    lab.cancel(training.job_id)
    training.wait_end()
    how = "cold" if cold else "warm"
    return {
        f"sbatch to the supervisor's first event, {how} page cache, s": started - began,
        f"from there to the last of {NODES} watchers, {how}, s": max(ready) - started,
    }


def first_step(lab: Lab, name: str) -> dict[str, float]:
    """Submit the reference training by `stepkeeper submit`; look when it does what."""
    training = Training(lab, name=name)
    began = time.time()
    submitted = lab.run(
        *(training.stepkeeper, "submit", "--json", "-N", "2", "--gpus-per-node=1", f"--run-dir={training.run_dir}"),
        *("--sbatch=--mem=2000", "--sbatch=--cpus-per-task=1", f"--output={training.log}", f"--job-name={name}", "--"),
        *(training.python, "-m", "stepkeeper_trainer.examples.train_lm", "--steps=20", *SMALL),
        user=training.user,
        timeout_s=WITHIN_S,
    )
    answered = time.time()
    training.job_id = json.loads(submitted.stdout)["job"]
    training.until(training.rows, "the first step", WITHIN_S)
    first = min(float(row["time"]) for row in training.rows().values())
    started = training.events(on.AttemptStarted)[0].event.at
    launched = training.events(on.LaunchBegan)[0].event.at
    training.wait_end()
    return {
        "`stepkeeper submit` (settings, doctor's look at the cluster, sbatch --test-only, sbatch), s": answered - began,
        "submitted to the supervisor's first event, s": started - answered,
        "from there to ranks that run (watchers, storage, clear nodes, srun), s": launched - started,
        "from there to the first step (Python, torch, rendezvous, the step), s": first - launched,
        "`stepkeeper submit` to the first step, s": first - began,
    }


def calls(lab: Lab) -> dict[str, float]:
    """Count the Slurm commands of a run: while it trains, and for a rank that is killed."""
    shims = lab.workdir("games") / "counted"
    log = lab.workdir("games") / "counted.txt"
    shims.mkdir()
    for command in COUNTED:
        real = lab.run("sh", "-c", f"command -v {command}").stdout.strip()
        shim = shims / command
        shim.write_text(f'#!/bin/sh\necho {command} "$1" >>{log}\nexec {real} "$@"\n')
        shim.chmod(0o755)
    log.touch()
    log.chmod(0o666)
    path = lab.run("sh", "-c", "echo $PATH", user="games").stdout.strip()
    training = Training(lab, name="calls", steps=40_000, every=20, step_seconds=0.1, env={"PATH": f"{shims}:{path}"})
    training.submit()
    training.wait_step(21, WITHIN_S)

    counted = [0]

    def since() -> float:
        """Return how many calls there were since the last time."""
        counted.append(len(log.read_text().splitlines()))
        return float(counted[-1] - counted[-2])

    found = {"Slurm commands until training runs": since()}
    time.sleep(IDLE_S)
    found["Slurm commands an hour while training runs"] = since() * HOUR_S / IDLE_S
    lab.run("scancel", "--signal=KILL", f"{training.job_id}.1")
    training.until(lambda: any(row["launch"] == "1" for row in training.rows().values()), "the relaunch", WITHIN_S)
    found["Slurm commands for a failed launch (the next srun included)"] = since()
    urgent = lab.preempt(training.job_id)
    lab.wait_job(urgent, "RUNNING", timeout_s=WITHIN_S)
    lab.release(urgent)
    training.until(lambda: any(row["attempt"] == "1" for row in training.rows().values()), "the requeue", WITHIN_S)
    found["Slurm commands for a preemption (save, requeue, and until the next attempt trains)"] = since()
    lab.cancel(training.job_id)
    training.wait_end()
    return found


if __name__ == "__main__":
    main()
