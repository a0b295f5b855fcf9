"""What snapshots in memory cost, and what they spare after a killed rank: the same training with and without.

Two ranks as two nodes, on one machine, started by hand: what a supervisor and Slurm add is in `tests.bench_recovery`.
Ways take turns within each round, so that what else the machine does befalls all.

    python -m tests.bench_snapshots [--rounds 3] [--width 256]
"""

from __future__ import annotations

import argparse
import csv
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path

from tests.trainer.ranks import Ranks, losses

WAYS = {"no snapshots": None, "every 10 steps": "10 steps", "every 5 steps": "5 steps"}
EVERY = 40  # steps from one save to the next
KILL_AT = 75
STEPS = 100
WORLD = 2
LEFT_OUT = 12  # first steps, in which torch and the memory for saves are made ready


def ranks(run: Path, memory: Path, every: str | None, *arguments: str) -> Ranks:
    def of_rank(rank: int) -> dict[str, str]:
        own = {"STEPKEEPER_SNAPSHOT_EVERY": every} if every is not None else {}
        return {"SLURMD_NODENAME": f"n{rank}", "STEPKEEPER_SNAPSHOT_DIR": str(memory), **own}

    return Ranks(WORLD, run, *arguments, steps=STEPS, every=EVERY, of_rank=of_rank)


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
    found: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    for _ in range(chosen.rounds):
        for way in WAYS:
            root = Path(tempfile.mkdtemp(dir="/dev/shm"))  # storage for saves as quick as memory: it favours none
            try:
                found[way].append(one(way, model, root))
            finally:
                shutil.rmtree(root)
            print(way, found[way][-1], flush=True)
    for way, rows in found.items():
        print(
            f"{way:16}", *(f"{name} {statistics.median(row[name] for row in rows):.1f}" for name in rows[0]), sep="  "
        )


if __name__ == "__main__":
    main()
