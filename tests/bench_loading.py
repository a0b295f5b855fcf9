"""What loading and verifying cost, against stock `dcp.load` and against reading the bytes.

`load_part` and `verify_part` are sections for `tests.bench_checkpoint`; alone:

    python -m tests.bench_loading [--mib 1024] [--tensors 100 20000] [--ranks 1 2] [--repeats 3] [--directory DIR]

Each figure is a ratio of two that one process measured one after the other: machines are noisy and shared.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

from tests.ports import reserve

ROOT = Path(__file__).parents[1]
LIMIT_S = 1200.0
LOOK_FILES = 4000
Figures = dict[str, float]
Row = tuple[str, float, str, float]  # what, the figure, how it is to compare, the bound


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure loading and verification.")
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--tensors", type=int, nargs="+", default=[100, 20_000])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--directory", type=Path, help="on the storage to measure (default: a temporary one)")
    parser.add_argument("--worker", choices=list(WORKERS), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker is not None:
        print(json.dumps(WORKERS[options.worker](options)), flush=True)
        return
    print("\n".join([*load_part(options)[0], *verify_part(options)[0]]))


LOAD_HEAD = """\
Every rank loads the whole state, {mib} MiB saved by stock DCP, into tensors that are there. *Stock* and *broadcast*
are multiples of Stepkeeper's time: above 1 Stepkeeper is faster. Stepkeeper checks every byte, `dcp.load` checks
nothing. *Broadcast*: one rank loads, gloo sends it to the others. *Cat*: the time of `cat` as a share of
Stepkeeper's. *Memory*: the peak beyond the tensors, in MiB. Cold: the page cache was dropped before."""


def load_part(options: argparse.Namespace) -> tuple[list[str], list[Row]]:
    """Return the section on loading, and what it comes to."""
    rows: list[Row] = []
    lines = ["## Loading", "", LOAD_HEAD.format(mib=options.mib), ""]
    columns = ("stock", "stock, cold", "broadcast", "cat", "memory MiB", "stock's memory MiB")
    lines += ["| | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for tensors in options.tensors:
        with tempfile.TemporaryDirectory(dir=options.directory, prefix="bench-loading-") as directory:
            _launch("save", 1, tensors, directory, options)
            for ranks in options.ranks:
                found = _launch("load", ranks, tensors, directory, options)
                found["memory MiB"] = _launch("memory", ranks, tensors, directory, options)["MiB"]
                found["stock's memory MiB"] = _launch("memory of stock", ranks, tensors, directory, options)["MiB"]
                cells = [f"{found[name]:.2f}" if name in found else "-" for name in columns]
                what = f"{ranks} rank{'s' * (ranks > 1)}, {tensors} tensors"
                lines.append(f"| {what} | {' | '.join(cells)} |")
                rows += [
                    (f"load, of stock's speed: {what}", found["stock"], ">=", 1.0),
                    (f"load, of stock's speed, cold: {what}", found["stock, cold"], ">=", 1.0),
                ]
    print("\n".join(lines), flush=True)
    return [*lines, ""], rows


VERIFY_HEAD = """\
Deep verification reads every byte of {mib} MiB and compares digests. *Cat*: the time of `cat` as a share of
Stepkeeper's; 1 is the speed of reading. Cold: past the page cache, against a `cat` after it was dropped. *A look*
compares names, sizes and coverage. It is taken of a step of {files} files, and of steps of so many tensors."""


def verify_part(options: argparse.Namespace) -> tuple[list[str], list[Row]]:
    """Return the section on verification, and what it comes to."""
    rows: list[Row] = []
    lines = ["## Verification", "", VERIFY_HEAD.format(mib=options.mib, files=LOOK_FILES), ""]
    lines += ["| | cat | cat, cold | a look, ms |", "|---|---|---|---|"]
    for tensors in options.tensors:
        with tempfile.TemporaryDirectory(dir=options.directory, prefix="bench-verify-") as directory:
            _launch("save", 1, tensors, directory, options)
            found = _launch("verify", 1, tensors, directory, options)
            lines.append(f"| {tensors} tensors | {found['cat']:.2f} | {found['cold']:.2f} | {found['look_ms']:.0f} |")
            rows.append((f"deep verification, of `cat`: {tensors} tensors", found["cat"], ">=", 0.9))
            rows.append((f"deep verification, of `cat`, cold: {tensors} tensors", found["cold"], ">=", 0.9))
    with tempfile.TemporaryDirectory(dir=options.directory, prefix="bench-look-") as directory:
        found = _launch("look", 1, 1, directory, options)
        lines.append(f"| {LOOK_FILES} files | - | - | {found['look_ms']:.0f} |")
    print("\n".join(lines), flush=True)
    return [*lines, ""], rows


def _launch(worker: str, ranks: int, tensors: int, directory: str, options: argparse.Namespace) -> Figures:
    """Return the figures of the slowest rank: those of rank 0, which measures between barriers."""
    command = [sys.executable, "-m", "tests.bench_loading", f"--worker={worker}", f"--mib={options.mib}"]
    command += [f"--tensors={tensors}", f"--directory={directory}", f"--repeats={options.repeats}"]
    port = reserve()
    processes = []
    for rank in range(ranks):
        own = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "trainer"), str(ROOT)])}
        own |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        own["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // ranks))
        processes.append(subprocess.Popen(command, cwd=ROOT, env=own, stdout=subprocess.PIPE, text=True))
    try:
        said = [process.communicate(timeout=LIMIT_S)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert all(process.returncode == 0 for process in processes), f"{worker}: {said}"
    figures: Figures = json.loads(said[0].splitlines()[-1])
    return figures


# --- in a rank ---------------------------------------------------------------------------------------------


def _step(options: argparse.Namespace) -> Path:
    directory: Path = options.directory
    return directory / "step_00000001"


def _save(options: argparse.Namespace) -> Figures:
    import torch  # noqa: PLC0415

    from stepkeeper_trainer.formats.manifest import CHUNK_BYTES  # noqa: PLC0415
    from tests.trainer.steps_by_dcp import save  # noqa: PLC0415

    [tensors] = options.tensors
    size = max(1, options.mib * 2**20 // 4 // tensors)
    state = {f"model.layers.{i}.weight": torch.randn(size) for i in range(tensors)}
    save(_step(options), state, chunk_bytes=CHUNK_BYTES)
    os.sync()
    return {}


class _Ways:
    """The ways to load, in one rank."""

    def __init__(self, step: Path) -> None:
        import torch  # noqa: PLC0415
        import torch.distributed as dist  # noqa: PLC0415

        self.step, self.dist = step, dist
        dist.init_process_group("gloo", timeout=timedelta(seconds=LIMIT_S))
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.group: Any = dist.group.WORLD if self.ranks > 1 else None
        self.state = {name: torch.zeros(entry.size) for name, entry in self._reader().contents.tensors.items()}

    def _reader(self) -> Any:
        from stepkeeper_trainer.formats.manifest import read_manifest  # noqa: PLC0415
        from stepkeeper_trainer.load.reader import CheckedReader  # noqa: PLC0415

        return CheckedReader(self.step, read_manifest(self.step))

    def ours(self) -> None:
        from stepkeeper_trainer.load.reader import load  # noqa: PLC0415

        load(self._reader(), self.state, self.group)

    def stock(self) -> None:
        import torch.distributed.checkpoint as dcp  # noqa: PLC0415

        dcp.load(dict(self.state), checkpoint_id=self.step, no_dist=self.group is None)

    def broadcast(self) -> None:
        if self.rank == 0:
            self._reader().fill(self.state)
        for tensor in self.state.values():
            self.dist.broadcast(tensor, src=0)

    def cat(self) -> None:
        if self.rank == 0:
            _cat(self.step)

    def timed(self, call: Callable[[], None], *, cold: bool = False) -> float:
        """Return how long the slowest rank takes."""
        if cold and self.rank == 0:
            _drop(self.step)
        self.dist.barrier()
        started_at = time.perf_counter()
        call()
        self.dist.barrier()
        return time.perf_counter() - started_at


def _load(options: argparse.Namespace) -> Figures:
    warnings.simplefilter("ignore")
    ways = _Ways(_step(options))
    ways.ours()
    figures: dict[str, list[float]] = {}
    for _ in range(options.repeats):
        own = ways.timed(ways.ours)
        one = {"stock": ways.timed(ways.stock) / own, "cat": ways.timed(ways.cat) / own}
        one["stock, cold"] = ways.timed(ways.stock, cold=True) / ways.timed(ways.ours, cold=True)
        if ways.ranks > 1:
            one["broadcast"] = ways.timed(ways.broadcast) / own
        for name, value in one.items():
            figures.setdefault(name, []).append(value)
    ways.dist.destroy_process_group()
    return {name: statistics.median(values) for name, values in figures.items()}


def _memory(options: argparse.Namespace) -> Figures:
    """Measure the first load of a process: later ones find memory that was asked for before."""
    warnings.simplefilter("ignore")
    ways = _Ways(_step(options))
    for tensor in ways.state.values():
        tensor.fill_(1)  # its pages are there
    before = _status("VmRSS:")
    (ways.stock if options.worker == "memory of stock" else ways.ours)()
    ways.dist.destroy_process_group()
    return {"MiB": (_status("VmHWM:") - before) / 2**20}


def _verify(options: argparse.Namespace) -> Figures:
    from stepkeeper_trainer.formats.reading import Reading  # noqa: PLC0415
    from stepkeeper_trainer.formats.verify import verify  # noqa: PLC0415

    step = _step(options)

    def deep(*, from_disk: bool) -> None:
        assert verify(step, reading=Reading(from_disk=from_disk)).ok

    def look() -> None:
        assert verify(step, deep=False).ok

    deep(from_disk=False)
    warm, cold, looks = [], [], []
    for _ in range(max(3, options.repeats)):
        warm.append(_timed(lambda: _cat(step)) / _timed(lambda: deep(from_disk=False)))
        taken: dict[str, float] = {}
        for what in ("cat", "deep", "deep", "cat"):  # what comes first may find another disk than what comes later
            _drop(step)
            seconds = _timed(lambda: _cat(step)) if what == "cat" else _timed(lambda: deep(from_disk=True))
            taken[what] = taken.get(what, 0.0) + seconds
        cold.append(taken["cat"] / taken["deep"])
        looks.append(_timed(look) * 1000)
    return {
        "cat": statistics.median(warm),
        "cold": statistics.median(cold),
        "look_ms": statistics.median(looks),
    }


def _look(options: argparse.Namespace) -> Figures:
    import torch  # noqa: PLC0415

    from stepkeeper_trainer.formats.verify import verify  # noqa: PLC0415
    from tests.trainer.steps_by_dcp import commit, save  # noqa: PLC0415

    step = _step(options)
    save(step, {"a": torch.zeros(8)})
    for number in range(1, LOOK_FILES):
        (step / f"__{number}_0.distcp").write_bytes(b"x")
    (step / "MANIFEST.json").unlink()
    commit(step)

    def look() -> None:
        assert verify(step, deep=False).ok

    return {"look_ms": statistics.median(_timed(look) * 1000 for _ in range(5))}


WORKERS: dict[str, Callable[[argparse.Namespace], Figures]] = {
    "save": _save,
    "load": _load,
    "memory": _memory,
    "memory of stock": _memory,
    "verify": _verify,
    "look": _look,
}


def _files(step: Path) -> list[Path]:
    return sorted(path for path in step.iterdir() if path.name.endswith(".distcp"))


def _cat(step: Path) -> None:
    with open(os.devnull, "wb") as nowhere:
        subprocess.run(["cat", *_files(step)], stdout=nowhere, check=True, timeout=LIMIT_S)


def _drop(step: Path) -> None:
    for path in _files(step):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _timed(call: Callable[[], object]) -> float:
    started_at = time.perf_counter()
    call()
    return time.perf_counter() - started_at


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


if __name__ == "__main__":
    main()
