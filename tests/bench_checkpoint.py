"""`make bench-checkpoint`: what saves, loads and verification cost, against others and the limits of the machine.

Every way to save runs in processes of its own, in turn, and is compared with a warm memory copy of the same
tensors and with `dd` and fsync of as many bytes, which that very process measures before each save.

    python -m tests.bench_checkpoint [--quick] [--mib 256] [--larger 4096] [--tensors 100 20000] [--ranks 1 2 4]

The page says what was missed, too.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from tests.bench_loading import Row, load_part, verify_part
from tests.bench_notes import HEAD, NOTES, SAVE_HEAD, TARGETS_HEAD
from tests.ports import reserve

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/benchmarks-checkpoint.md"
OURS, THREAD = "stepkeeper", "dcp.async_save, thread"
UNPREPARED = "stepkeeper, planning included"
PEERS = ("torchsnapshot", "torch_checkpointing")  # measured where they are installed
WAYS = (OURS, THREAD, "dcp.async_save, process", "dcp.save", "torch.save", *PEERS)
AT_MORE_RANKS = (OURS, THREAD, "dcp.save")  # and of more bytes
LIMIT_S = 1200.0
NEEDS_TIMES = 3.4  # the state, its gradients, what a save stages, and the copy that it is compared with
Figures = dict[str, float]
Found = dict[tuple[int, int, str], Figures]  # by ranks, tensors, and the way


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure checkpoints against others and the machine's limits.")
    parser.add_argument("--quick", action="store_true", help="in two minutes: smaller, fewer, two ranks at most")
    parser.add_argument("--mib", type=int, help="of state (default 256)")
    parser.add_argument("--larger", type=int, nargs="*", default=[], help="MiB: few tensors on one rank, once more")
    parser.add_argument("--tensors", type=int, nargs="+", help="few large and many small (default 100 20000)")
    parser.add_argument("--ranks", type=int, nargs="+", help="default 1 2 4")
    parser.add_argument("--repeats", type=int, default=1, help="of everything, in turn")
    parser.add_argument("--saves", type=int, default=3, help="of each process, after the first")
    parser.add_argument("--ways", nargs="+", choices=WAYS)
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--directory", type=Path, help="on the storage to measure (default: a temporary one)")
    parser.add_argument("--page", type=Path, default=PAGE)
    options = parser.parse_args()
    quick = options.quick
    options.mib = options.mib or (128 if quick else 256)
    options.tensors = options.tensors or ([100, 5000] if quick else [100, 20_000])
    options.ranks = options.ranks or ([1, 2] if quick else [1, 2, 4])
    options.ways = options.ways or ([OURS, THREAD] if quick else list(WAYS))
    started_at = time.monotonic()
    lines = ["# Checkpoints", "", HEAD.format(**facts(options)), ""]
    rows: list[Row] = []
    for part in options.parts:
        found, reached = PARTS[part](options)
        lines += found
        rows += reached
    lines += targets(rows)
    lines += NOTES.splitlines()
    options.page.write_text("\n".join(lines).rstrip() + "\n")
    print(f"{options.page}, in {(time.monotonic() - started_at) / 60:.0f} minutes")


def facts(options: argparse.Namespace) -> dict[str, object]:
    """Return what a reader must know of the machine, and nothing that names it."""
    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        place = os.path.realpath(directory)
    mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    kind = max((len(mount[1]), mount[2]) for mount in mounts if f"{place}/".startswith(f"{mount[1].rstrip('/')}/"))[1]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cores": os.cpu_count(),
        "memory": round(memory / 2**30),
        "kind": kind,
        "torch": importlib.metadata.version("torch"),
        "isal": "with ISA-L" if importlib.util.find_spec("isal") else "without ISA-L",
        "mib": options.mib,
        "load": f"{os.getloadavg()[0]:.1f}",
    }


# --- saving ------------------------------------------------------------------------------------------------

COLUMNS = ("first blocked", "blocked", "slowed", "durable", "memory")


def save_part(options: argparse.Namespace) -> tuple[list[str], list[Row]]:
    """Return the section on saving, and what it comes to."""
    found: Found = {}
    lines = ["## Saving", "", SAVE_HEAD.format(saves=options.saves, mib=options.mib), ""]
    for ranks in options.ranks:
        for tensors in options.tensors:
            ways = [way for way in options.ways if ranks == 1 or way in AT_MORE_RANKS]
            lines += _table(ranks, tensors, ways, options, found)
    rows = _reached(found, options)
    for mib in options.larger:
        needs, has = NEEDS_TIMES * mib / 1024, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
        if needs > has:
            lines += [
                f"{mib} MiB of state were not measured: that takes {needs:.0f} GiB of memory, and {has:.0f} are here.",
                "",
            ]
            continue
        few = argparse.Namespace(**{**vars(options), "mib": mib})
        ways = [way for way in options.ways if way in AT_MORE_RANKS]
        larger = _table(1, min(options.tensors), ways, few, None)
        lines += [f"{larger[0]}, {mib} MiB", *larger[1:]]
    return lines, rows


def _table(ranks: int, tensors: int, ways: list[str], options: argparse.Namespace, found: Found | None) -> list[str]:
    measured: dict[str, list[Figures]] = {way: [] for way in ways}
    failed: dict[str, str] = {}
    for _ in range(options.repeats):
        for way in ways:
            if way in PEERS and importlib.util.find_spec(way) is None:
                failed[way] = "is not installed"
                continue
            try:
                measured[way].append(launch(way, ranks, tensors, options))
            except RuntimeError as error:
                failed[way] = f"fails: {error}"
    if ranks == 1 and OURS in ways and found is not None:
        planned = launch(UNPREPARED, ranks, tensors, options, saves=0, paused=True)
        found[ranks, tensors, UNPREPARED] = planned
    lines = [f"### {ranks} rank{'s' * (ranks > 1)}, {tensors} tensors", ""]
    lines += ["| | " + " | ".join(COLUMNS) + " | blocked / slowed / durable, s |", "|---" * (len(COLUMNS) + 2) + "|"]
    for way, figures in measured.items():
        if not figures:
            lines.append(f"| {way} | {failed[way]} |" + " |" * len(COLUMNS))
            continue
        middle = {name: statistics.median(one[name] for one in figures) for name in figures[0]}
        if found is not None:
            found[ranks, tensors, way] = middle
        cells = [f"{middle[name]:.2f}x" for name in COLUMNS]
        seconds = " / ".join(f"{middle[name]:.2f}" for name in ("blocked_s", "slowed_s", "durable_s"))
        lines.append(f"| {way} | {' | '.join(cells)} | {seconds} |")
    print("\n".join(lines), flush=True)
    return [*lines, ""]


def _reached(found: Found, options: argparse.Namespace) -> list[Row]:
    """Return what the figures come to, beside what was to be reached."""
    few, many = min(options.tensors), max(options.tensors)
    rows: list[Row] = []

    def compare(what: str, ranks: int, tensors: int, name: str, bound: float, *, over: str | None = None) -> None:
        own, other = found.get((ranks, tensors, OURS)), found.get((ranks, tensors, over or OURS))
        if own is None or other is None:
            return
        figure = own[name] / other[name] if over is not None and other[name] else own[name]
        sign = ">=" if name == "durable" else "<="
        rows.append((f"{what}: {ranks} rank{'s' * (ranks > 1)}, {tensors} tensors", figure, sign, bound))

    for ranks in options.ranks:
        for tensors in sorted({few, many}):
            compare("first blocked, of a warm copy", ranks, tensors, "first blocked", 1.3)
            compare("blocked, of a warm copy", ranks, tensors, "blocked", 1.3)
            compare("blocked, of stock async's", ranks, tensors, "blocked_s", 1.0, over=THREAD)
            compare("durable, of `dd`", ranks, tensors, "durable", 0.9)
            compare("memory, of the state", ranks, tensors, "memory", 1.05)
        compare("slowed, of stock async's", ranks, many, "slowed_s", 0.1, over=THREAD)
    for way in options.ways:
        for tensors in sorted({few, many}):
            if way != OURS:
                compare(f"seconds until durable, of {way}", 1, tensors, "durable_s", 1.0, over=way)
    small, large = found.get((1, many, UNPREPARED)), found.get((1, few, UNPREPARED))
    if small is not None and large is not None:
        what = f"a first save without training beside it, planning included: {many} tensors, of {few}"
        rows.append((what, small["first durable_s"] / large["first durable_s"], "<=", 1.5))
    return rows


def targets(rows: list[Row]) -> list[str]:
    """Return what was to be reached, and what was."""
    lines = ["## What was to be reached", "", TARGETS_HEAD, "", "| | found | target | |", "|---|---|---|---|"]
    for what, figure, sign, bound in rows:
        met = figure <= bound if sign == "<=" else figure >= bound
        lines.append(f"| {what} | {figure:.2f} | {sign} {bound:g} | {'' if met else '**missed**'} |")
    print("\n".join(lines), flush=True)
    return [*lines, ""]


def launch(
    way: str, ranks: int, tensors: int, options: argparse.Namespace, *, saves: int | None = None, paused: bool = False
) -> Figures:
    """Measure one way to save; return the figures of the slowest rank."""
    port = reserve()
    with tempfile.TemporaryDirectory(dir=options.directory, prefix="bench-checkpoint-") as directory:
        command = [sys.executable, "-m", "tests.bench_saving", f"--way={way}", f"--mib={options.mib}"]
        command += [f"--tensors={tensors}", f"--directory={directory}"]
        command += [f"--saves={options.saves if saves is None else saves}", *["--paused"] * paused]
        processes, pipe = [], subprocess.PIPE
        for rank in range(ranks):
            own = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "trainer"), str(ROOT)])}
            if ranks > 1:
                own |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank)}
                own |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            own["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // ranks))
            processes.append(subprocess.Popen(command, cwd=ROOT, env=own, stdout=pipe, stderr=pipe, text=True))
        found: list[Figures] = []
        try:
            for process in processes:
                said, errors = process.communicate(timeout=LIMIT_S)
                if process.returncode:
                    known = [line for line in errors.splitlines() if re.search(r"Error\b.*:", line)]
                    raise RuntimeError((known or errors.splitlines() or ["?"])[-1].strip())
                found.append(json.loads(said.splitlines()[-1]))
        finally:
            for process in processes:
                process.kill()
    worst = {name: max(one[name] for one in found) for name in found[0]}
    return worst | {"durable": min(one["durable"] for one in found)}


PARTS: dict[str, Callable[[argparse.Namespace], tuple[list[str], list[Row]]]] = {
    "save": save_part,
    "load": load_part,
    "verify": verify_part,
}


if __name__ == "__main__":
    main()
