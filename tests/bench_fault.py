"""What a GPU that fails costs a run: `python -m tests.bench_fault [--repeats 3]` (root, Slurm).

A training on two nodes with a spare and agents; XID 79 in the kernel log in mid-training.  One run does all repeats on
one lab: quote the medians.
"""

import argparse
import time

from stepkeeper.core import effects as do
from stepkeeper.core import events as on
from tests.lab import Lab, LabOptions
from tests.lab.agents import Agents
from tests.measuring import print_medians
from tests.training import Training

STEP_SECONDS = 0.2


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the loss of a GPU on a lab cluster.")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    found: dict[str, list[float]] = {}
    with Lab(LabOptions(grace_time_s=60, kill_wait_s=10)) as lab:
        for repeat in range(options.repeats):
            with Agents(lab, nvml=True) as agents:
                agents.start()
                for name, value in one(lab, agents, f"bench-{repeat}").items():
                    found.setdefault(name, []).append(value)
    print_medians(found)


def one(lab: Lab, agents: Agents, name: str) -> dict[str, float]:
    training = Training(
        lab,
        name=name,
        nodes=3,
        steps=4000,
        every=20,
        step_seconds=STEP_SECONDS,
        run_args=("--spares=1",),
        env={"STEPKEEPER_AGENT_SOCKET": str(agents.directory / "%N" / "run" / "agent.sock")},
    ).submit()
    training.wait_step(25)
    bad = next(node for node in training.launches()[0] if node != lab.job(training.job_id).batch_host)
    written = time.time()  # before the process that writes it has started: an upper bound
    agents.inject(bad, 79)
    training.until(lambda: first_step_at(training) is not None, "the first new step")
    lab.cancel(training.job_id)
    training.wait_end()
    lab.undrain(bad)

    records = training.records()
    faulted = training.events(on.NodeFaulted)[0].event.at
    ended = training.events(on.LaunchEnded)[0].event.at
    started = next(
        r.event.at for r in records if r.launch == 1 and any(isinstance(e, do.StartLaunch) for e in r.effects)
    )
    hello = next(r.event.at for r in records if r.launch == 1 and isinstance(r.event, on.RankHello))
    step = first_step_at(training)
    assert step is not None, "it was waited for"
    return {
        "XID written to the job's supervisor told, s (the writing command's own start included)": faulted - written,
        "told to launch stopped, s": ended - faulted,
        "stopped to next launch on the spare, s (checkpoint read and verified, nodes cleared and checked)": started
        - ended,
        "process start and import of torch, s": hello - started,
        "load and first step, s": step - hello,
        "told to first new step, s": step - faulted,
    }


def first_step_at(training: Training) -> float | None:
    """When the first step of the second launch was done, by metrics.csv: the journal holds few of them."""
    return min((float(row["time"]) for row in training.rows().values() if row["launch"] == "1"), default=None)


if __name__ == "__main__":
    main()
