"""What snapshots in memory cost, and what they spare after a killed rank: the same training with and without.

Two ranks as two nodes, on one machine, started by hand: what a supervisor and Slurm add is in `tests.bench_recovery`.
Ways take turns within each round, so that what else the machine does befalls all.

    python -m tests.bench_snapshots [--rounds 3] [--width 256]
    python -m tests.bench_snapshots --loads [--rounds 5] [--width 1024] [--storage DIR]

With `--loads` the sharded training (FSDP) is killed, and resumes from one snapshot in two ways: read from memory, and
copied to storage first.  It is copied where ranks have changed their nodes: none finds its own part there.
"""

from __future__ import annotations

import argparse
import csv
import os
import re
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from tests.trainer.ranks import Ranks, losses

WAYS = {"no snapshots": None, "every 10 steps": "10 steps", "every 5 steps": "5 steps"}
READ, COPIED = LOADS = ("read from memory", "copied to storage first")
EVERY = 40  # steps from one save to the next
KILL_AT = 75
STEPS = 100
WORLD = 2
LEFT_OUT = 12  # first steps, in which torch and the memory for saves are made ready


def ranks(run: Path, memory: Path, every: str | None, *arguments: str, swapped: bool = False) -> Ranks:
    def of_rank(rank: int) -> dict[str, str]:
        own = {"STEPKEEPER_SNAPSHOT_EVERY": every} if every is not None else {}
        return {"SLURMD_NODENAME": f"n{1 - rank if swapped else rank}", "STEPKEEPER_SNAPSHOT_DIR": str(memory), **own}

    return Ranks(WORLD, run, *arguments, steps=STEPS, every=EVERY, of_rank=of_rank)


def loads(model: list[str], root: Path, storage: Path) -> dict[str, dict[str, float]]:
    """Kill a sharded training, and resume from its snapshot in both ways; return what was measured, by way."""
    run, memory, kept = storage / "run", root / "memory", root / "kept"
    memory.mkdir(parents=True, mode=0o700)
    with ranks(run, memory, "2 steps", *model) as first:
        first.until(lambda: "snapshot_held" in first.logs[0].read_text())
        first.kill()
        step = int(re.findall(r"snapshot_held step=(\d+)", first.logs[0].read_text())[-1])
    for each in (run, memory):
        shutil.copytree(each, kept / each.name)
    found = {}
    for way in LOADS:
        for each in (run, memory):
            shutil.rmtree(each)
            shutil.copytree(kept / each.name, each)
        began = time.monotonic()
        with ranks(run, memory, "2 steps", "--resume-from=latest", *model, swapped=way == COPIED) as again:
            again.until(lambda: f" resumed step={step} " in again.logs[0].read_text())
            took = time.monotonic() - began
            again.kill()
            assert ("step_brought" in again.output()) is (way == COPIED), again.output()
        size = sum(path.stat().st_size for path in (kept / memory.name).glob(f"*/*/checkpoints/step_*{step}/__*")) / 1e6
        found[way] = {"start of the ranks to resumed (s)": took, "state (MB)": size}
    return found


def times(run: Path, launch: str | None = None) -> dict[int, float]:
    """Return when each step was done."""
    with (run / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    return {int(row["step"]): float(row["time"]) for row in rows if launch is None or row["launch"] == launch}


def cpu_s(started: Ranks) -> float:
    """Return the CPU time of all ranks so far: it tells of their work, whatever else the machine does."""
    fields = [Path(f"/proc/{each.pid}/stat").read_text().rpartition(")")[2].split() for each in started.processes]
    return sum(int(each[11]) + int(each[12]) for each in fields) / os.sysconf("SC_CLK_TCK")


def one(way: str, model: list[str], root: Path) -> dict[str, float]:
    """Train, kill a rank, and go on; return what was measured."""
    run, memory = root / "run", root / "memory"
    memory.mkdir(parents=True, mode=0o700)
    with ranks(run, memory, WAYS[way], *model) as first:
        first.until_step(LEFT_OUT)
        used, since = cpu_s(first), max(losses(run))
        first.until_step(KILL_AT)
        used = (cpu_s(first) - used) / (max(losses(run)) - since)
        killed_at = time.time()
        first.kill()
    done = times(run)
    last = max(done)
    a_step = [done[step] - done[step - 1] for step in sorted(done) if step > LEFT_OUT and step - 1 in done]
    with ranks(run, memory, WAYS[way], "--resume-from=latest", *model) as second:
        second.until(lambda: max(losses(run)) > last)
        said = second.logs[0].read_text()
    resumed = int(said.partition("resumed step=")[2].split()[0])
    return {
        "CPU of both ranks, a step (ms)": 1000 * used,
        "step, mean (ms)": 1000 * statistics.mean(a_step),
        "step, median (ms)": 1000 * statistics.median(a_step),
        "steps done again": last - resumed,
        "kill to the next new step (s)": times(run)[last + 1] - killed_at,
        "state (MB)": sum(path.stat().st_size for path in (run / "checkpoints/step_00000040").iterdir()) / 1e6,
    }


def main() -> None:
    """Measure, and print a table of medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--loads", action="store_true", help="only what a relaunch takes to load a snapshot")
    parser.add_argument("--storage", default="/dev/shm", help="with --loads: where the run directory is")
    parser.add_argument("--layers", type=int, default=2)
    chosen = parser.parse_args()
    model = [
        f"--width={chosen.width}",
        f"--layers={chosen.layers}",
        "--heads=4",
        "--context=32",
        "--retention=newest 2",
    ]
    print(f"{os.cpu_count()} cores, load average {os.getloadavg()[0]:.1f} before it began", flush=True)
    found: dict[str, list[dict[str, float]]] = {way: [] for way in (LOADS if chosen.loads else WAYS)}
    for _ in range(chosen.rounds):
        if chosen.loads:
            with tempfile.TemporaryDirectory(dir=chosen.storage) as storage:
                note(found, lambda root, storage=storage: loads(model, root, Path(storage)))
        else:
            for way in WAYS:
                note(found, lambda root, way=way: {way: one(way, model, root)})
    for way, rows in found.items():
        print(
            f"{way:24}", *(f"{name} {statistics.median(row[name] for row in rows):.1f}" for name in rows[0]), sep="  "
        )


def note(found: dict[str, list[dict[str, float]]], measure: Callable[[Path], dict[str, dict[str, float]]]) -> None:
    """Measure in a directory of its own, in memory: storage as quick as that favours none."""
    root = Path(tempfile.mkdtemp(dir="/dev/shm"))
    try:
        for way, figures in measure(root).items():
            found[way].append(figures)
            print(way, figures, flush=True)
    finally:
        shutil.rmtree(root)


if __name__ == "__main__":
    main()
