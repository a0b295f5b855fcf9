"""What a start costs, and how often Slurm is asked: `python -m tests.bench_start [--repeats 3]` (root, Slurm).

A job on 16 nodes from a cold page cache: batch script to supervisor to all watchers.  Then a job on two nodes of which
a rank is killed: every call of a Slurm command is counted, idle and for the failure.
"""

import argparse
import os
import time
from pathlib import Path

from stepkeeper.core import events as on
from tests.lab import Lab, LabOptions
from tests.measuring import print_medians
from tests.training import Training

NODES = 16
COUNTED = ("scontrol", "scancel", "squeue", "sinfo", "sacct", "sbatch", "srun")
IDLE_S = 30.0


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
    training = Training(lab, name="calls", steps=4000, every=20, step_seconds=0.1, env={"PATH": f"{shims}:{path}"})
    training.submit()
    training.wait_step(21)
    at_start = len(log.read_text().splitlines())
    time.sleep(IDLE_S)
    idle = len(log.read_text().splitlines()) - at_start
    lab.run("scancel", "--signal=KILL", f"{training.job_id}.1")
    training.until(lambda: any(row["launch"] == "1" for row in training.rows().values()), "the relaunch")
    failure = len(log.read_text().splitlines()) - at_start - idle
    lab.cancel(training.job_id)
    training.wait_end()
    return {
        "Slurm commands until training runs": float(at_start),
        f"Slurm commands in {IDLE_S:g} s of training": float(idle),
        "Slurm commands for a failed launch (the next srun included)": float(failure),
    }


if __name__ == "__main__":
    main()
