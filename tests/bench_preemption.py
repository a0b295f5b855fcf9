"""`make bench`: what a preemption costs, part by part, and what supervisor and watchers cost meanwhile.

One run does all repeats, on one lab: quote the medians and ratios, not single times.

    python -m tests.bench_preemption [--repeats 3] [--width 512]
"""

import argparse
import os
import time
from collections.abc import Callable

from stepkeeper.core import events as on
from tests.lab import Lab, LabOptions, processes
from tests.measuring import cpu_s, print_medians, rss_mib
from tests.training import Training

STEP_SECONDS = 0.2


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure a preemption on a lab cluster.")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--width", type=int, default=512, help="of the model: the state grows with its square")
    options = parser.parse_args()
    script = (f"--width={options.width}", "--layers=4", "--heads=8", "--batch=4", "--micro-batch=1")
    found: dict[str, list[float]] = {}
    with Lab(LabOptions(grace_time_s=60, kill_wait_s=10)) as lab:
        for repeat in range(options.repeats):
            training = Training(
                lab, name=f"bench-{repeat}", steps=4000, every=100_000, step_seconds=STEP_SECONDS, script_args=script
            ).submit()
            for name, value in one(lab, training).items():
                found.setdefault(name, []).append(value)
    print_medians(found)


def one(lab: Lab, training: Training) -> dict[str, float]:
    training.wait_step(5)
    supervisor = lab.batch_pid(training.job_id)
    watchers = _watchers(lab, training)
    cpu = [cpu_s(pid) for pid in (supervisor, *watchers)]
    since = time.monotonic()
    time.sleep(10)
    spent = [
        (cpu_s(pid) - before) / (time.monotonic() - since)
        for pid, before in zip((supervisor, *watchers), cpu, strict=True)
    ]
    result = {
        "supervisor, RSS MiB": rss_mib(supervisor),
        "supervisor, % of a core while training": 100 * spent[0],
        "watcher, RSS MiB": max(map(rss_mib, watchers)),
        "watcher, % of a core while training": 100 * max(spent[1:]),
    }

    urgent = lab.preempt(training.job_id)
    lab.wait_job(urgent, "RUNNING", timeout_s=60, closely=True)
    running_at = time.time()
    lab.release(urgent)
    training.wait_attempt(1)
    training.until(lambda: _progressed(training, 1), "the first new step")
    lab.cancel(training.job_id)
    training.wait_end()

    notice = training.events(on.NodeSignaled)[0].event.at
    commit = next(r.event for r in training.events(on.CheckpointCommitted) if r.event.emergency)
    verified = training.events(on.CheckpointVerified)[0].event.at
    requeued = training.events(on.RequeueAnswered)[0].event.at
    second = [record.event for record in training.records() if record.attempt == 1]
    started = _first(second, on.AttemptStarted)
    launched = _first(second, on.NodesCleared)
    hello = _first(second, on.RankHello)
    step = _first(second, on.Progressed)
    copied = copy_and_write(lab, commit.bytes)
    return result | {
        "state, MiB": commit.bytes / 2**20,
        "notice to commit, s": commit.at - notice,
        "  a step, s (the save begins at a step boundary)": STEP_SECONDS,
        "copy and write with fsync of the same bytes, s": copied,
        "notice to commit / copy and write": (commit.at - notice) / copied,
        "commit to verified, s": verified - commit.at,
        "commit to requeued, s": requeued - commit.at,
        "commit to the urgent job running, s": running_at - commit.at,
        "requeue to first new step, s": step - requeued,
        "  of it Slurm's delay (credential expiry, here 5 s), s": started - requeued,
        "  of it Stepkeeper (bus, choice, clear nodes), s": launched - started,
        "  of it process start and import of torch, s": hello - launched,
        "  of it load and first step, s": step - hello,
    }


def copy_and_write(lab: Lab, size: int) -> float:
    """One copy in memory, one write with fsync: what a save of `size` bytes cannot beat."""
    source = bytearray(os.urandom(1 << 20)) * (size >> 20)
    target = bytearray(len(source))  # warm, as the reused staging buffers are
    path = lab.workdir("games") / "limit"
    since = time.monotonic()
    target[:] = source
    with path.open("wb") as file:
        file.write(target)
        file.flush()
        os.fsync(file.fileno())
    spent = time.monotonic() - since
    path.unlink()
    return spent


def _first(events: list[on.Event], kind: type) -> float:
    return next(event.at for event in events if isinstance(event, kind))


def _progressed(training: Training, attempt: int) -> bool:
    return any(record.attempt == attempt and isinstance(record.event, on.Progressed) for record in training.records())


def _watchers(lab: Lab, training: Training) -> list[int]:
    nodes = lab.job(training.job_id).nodes
    mine: Callable[[int], bool] = lambda pid: "stepkeeper.watcher.main" in processes.title(pid)  # noqa: E731
    tasks = {pid for node in nodes for pid in processes.by_environment("SLURMD_NODENAME", node)}
    return [pid for pid in tasks if processes.name(pid) not in ("srun", "slurmstepd") and mine(pid)]


if __name__ == "__main__":
    main()
