"""`make bench-gpu`: what saves and loads cost on a GPU, against the limits of the machine and torch's own.

    python -m tests.bench_gpu [--directory DIR] [--scale 1.0] [--repeats 5] [--json bench-gpu.json]

Everything is measured in one run on one GPU; compare ratios, and medians.  Without a GPU it says so and ends well.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from stepkeeper_trainer.save.replicas import hash_rows
from stepkeeper_trainer.save.staging import Arena, Staging

MIB, GIB = 1024**2, 1024**3
SHAPES = {"300 x 64 MiB": (300, 64 * MIB), "20,000 x 1 MiB": (20_000, MIB)}
SAVED_WITHIN_S = 600.0
STOCK = "dcp.async_save, pinned"


@dataclass(frozen=True)
class Row:
    """One figure: its median, and what it is compared with, measured in the same run."""

    what: str
    value: float
    unit: str
    limit: float | None = None  # or the counterpart's figure
    limit_is: str = ""
    note: str = ""

    @property
    def ratio(self) -> float | None:
        return self.value / self.limit if self.limit else None


@dataclass(frozen=True)
class Setting:
    directory: Path
    scale: float
    repeats: int

    def bytes_of(self, wanted: int, *, host: int = 2, disk: int = 0) -> int:
        """Return how much state to measure with: what is wanted, or what there is room for.

        `host` and `disk` are how many copies are there at a time.
        """
        limits = [wanted * self.scale, 0.4 * torch.cuda.mem_get_info()[0]]
        limits.append(0.6 * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES") / host)
        if disk:
            limits.append(0.8 * shutil.disk_usage(self.directory).free / disk)
        return int(min(limits)) // MIB * MIB


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--directory", type=Path, help="on the storage to measure (default: a temporary one)")
    parser.add_argument("--scale", type=float, default=1.0, help="of the sizes; they shrink to the memory there is")
    parser.add_argument("--repeats", type=int, default=5, help="of each figure, which is their median")
    parser.add_argument("--json", type=Path, default=Path("bench-gpu.json"))
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    options = parser.parse_args()
    if (why := no_gpu()) is not None:
        print(f"bench-gpu measures nothing here: {why}")
        return 0
    rows: list[Row] = []
    failed: dict[str, str] = {}
    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        setting = Setting(Path(directory), options.scale, options.repeats)
        for name in options.parts:
            print(f"{name} ...", file=sys.stderr, flush=True)
            try:
                rows += PARTS[name](setting)
            except Exception as error:  # noqa: BLE001  # the other parts are worth having
                traceback.print_exc()
                failed[name] = f"{type(error).__name__}: {error}"
            gc.collect()
            torch.cuda.empty_cache()
    facts = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "cuda": torch.version.cuda}
    print(table(rows, facts))
    for name, why in failed.items():
        print(f"{name} failed: {why}")
    record = {**facts, "rows": [{**asdict(row), "ratio": row.ratio} for row in rows], "failed": failed}
    options.json.write_text(json.dumps(record, indent=1) + "\n")
    print(f"written to {options.json}")
    return 1 if failed else 0


def no_gpu() -> str | None:
    """Say why there is nothing to measure."""
    if torch.version.cuda is None:
        return (
            f"torch {torch.__version__} was built without CUDA; "
            "`make bench-gpu GPU_PYTHON=/path/to/python` takes that of another environment"
        )
    if not torch.cuda.is_available():
        return "torch finds no GPU"
    return None


def table(rows: list[Row], facts: dict[str, Any]) -> str:
    lines = [f"{facts['gpu']}, torch {facts['torch']}, CUDA {facts['cuda']}", ""]
    lines += ["| what | median | of | ratio | |", "|---|---|---|---|---|"]
    for row in rows:
        limit = "" if row.limit is None else f"{row.limit:.3g} {row.unit}: {row.limit_is}"
        ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
        lines.append(f"| {row.what} | {row.value:.3g} {row.unit} | {limit} | {ratio} | {row.note} |")
    return "\n".join(lines) + "\n"


# --- clocks --------------------------------------------------------------------------------------------------------


def seconds(work: Callable[[], object]) -> float:
    """Return how long work takes, until the device has done it."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - began


def median_s(work: Callable[[], object], repeats: int) -> float:
    work()
    return statistics.median(seconds(work) for _ in range(repeats))


@dataclass
class Cost:
    """Of one save, to the one who trains."""

    blocked_s: float = 0.0  # the script
    stream_s: float = 0.0  # the device, in training's stream
    whole_s: float = 0.0  # until everything is in the host's memory, or durable


@contextmanager
def blocking(cost: Cost) -> Iterator[None]:
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    began = time.perf_counter()
    first.record()
    yield
    last.record()
    cost.blocked_s = time.perf_counter() - began
    last.synchronize()
    cost.stream_s = first.elapsed_time(last) / 1000


def medians(costs: list[Cost]) -> Cost:
    return Cost(*(statistics.median(each) for each in zip(*(asdict(cost).values() for cost in costs), strict=True)))


# --- parts ---------------------------------------------------------------------------------------------------------


def copy_rate(setting: Setting) -> list[Row]:
    """Copies of the device to pinned memory, and to memory that is not pinned."""
    size = setting.bytes_of(2 * GIB)
    source = torch.empty(size, dtype=torch.uint8, device="cuda")
    pinned = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    arena = Arena()
    arena.grow(size, pinned=True)
    plain = torch.zeros(size, dtype=torch.uint8)
    rates = {
        name: size / median_s(lambda to=to: to.copy_(source, non_blocking=True), setting.repeats) / 1e9
        for name, to in (("pinned", pinned), ("arena", arena.tensor[:size]), ("plain", plain))
    }
    del pinned, plain
    arena.release()
    note = f"{size / GIB:.1f} GiB"
    return [
        Row("copy to the staging arena", rates["arena"], "GB/s", rates["pinned"], "torch's pinned memory", note),
        Row("copy to memory that is not pinned", rates["plain"], "GB/s", rates["pinned"], "pinned", note),
    ]


def registration(setting: Setting) -> list[Row]:
    """Kernels of training while the arena is made in another thread: how long the longest gap is."""
    size = setting.bytes_of(16 * GIB)
    numbers = torch.rand(1 << 20, device="cuda")

    def longest_gap(until: Callable[[], bool]) -> float:
        longest, before = 0.0, time.perf_counter()
        while not until():
            numbers.mul_(1.0)
            torch.cuda.synchronize()
            now = time.perf_counter()
            longest, before = max(longest, now - before), now
        return longest

    end = time.perf_counter() + 2.0
    alone = longest_gap(lambda: time.perf_counter() >= end)
    arena, device = Arena(), torch.cuda.current_device()

    def make() -> None:
        with torch.cuda.device(device):
            arena.grow(size, pinned=True)

    thread = threading.Thread(target=make)
    began = time.perf_counter()
    thread.start()
    beside = longest_gap(lambda: not thread.is_alive())
    took = time.perf_counter() - began
    arena.release()
    note = f"{size / GIB:.1f} GiB in {took:.1f} s"
    what = "longest gap between kernels while memory is registered"
    return [Row(what, 1000 * beside, "ms", 1000 * alone, "without", note)]


def state_of(count: int, size: int, total: int) -> dict[str, torch.Tensor]:
    """Return tensors of that size: fewer where the memory is short."""
    return {f"t{n}": torch.rand(size // 4, device="cuda") for n in range(max(1, min(count, total // size)))}


def staged_saves(setting: Setting) -> list[Row]:
    """What a save takes from training until the state is in the host's memory, by the ways that there are."""
    rows = []
    for name, (count, size) in SHAPES.items():
        tensors = state_of(count, size, setting.bytes_of(count * size))
        total = sum(tensor.nbytes for tensor in tensors.values())
        limit = pinned_copy_s(total, setting.repeats)
        note = f"{len(tensors)} tensors, {total / GIB:.1f} GiB"
        for way, overlap in (("ordered", False), ("overlap", True)):
            cost = staging_cost(tensors, setting.repeats, overlap=overlap)
            rows += [
                Row(f"{name}, {way}: script blocked", cost.blocked_s, "s", limit, "one pinned copy", note),
                Row(f"{name}, {way}: device blocked", cost.stream_s, "s", limit, "one pinned copy", note),
                Row(f"{name}, {way}: in the host's memory", cost.whole_s, "s", limit, "one pinned copy", note),
            ]
        del tensors
        gc.collect()
        torch.cuda.empty_cache()
    return rows


def pinned_copy_s(total: int, repeats: int) -> float:
    """Return how long one copy of so many bytes to pinned memory takes."""
    size = min(total, GIB)
    source = torch.empty(size, dtype=torch.uint8, device="cuda")
    pinned = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    return total / size * median_s(lambda: pinned.copy_(source, non_blocking=True), repeats)


def staging_cost(tensors: dict[str, torch.Tensor], repeats: int, *, overlap: bool) -> Cost:
    staging = Staging(device=True, overlap=overlap)
    staging.take(tensors)
    staging.regroup([list(tensors)])
    costs = []
    for _ in range(1 + repeats):
        cost = Cost()
        began = time.perf_counter()
        with blocking(cost):
            assert staging.copy_if_it_fits(tensors)
        staging.finish()
        cost.whole_s = time.perf_counter() - began
        costs.append(cost)
    staging.arena.release()
    return medians(costs[1:])


def whole_saves(setting: Setting) -> list[Row]:
    """What a save takes from the script, and how long it takes to be durable, against `dcp.async_save`."""
    rows = []
    for name, (count, size) in SHAPES.items():
        tensors = state_of(count, size, setting.bytes_of(count * size, disk=setting.repeats + 4))
        note = f"{len(tensors)} tensors, {sum(tensor.nbytes for tensor in tensors.values()) / GIB:.1f} GiB"
        theirs = dcp_cost(tensors, setting)
        ours = manager_cost(tensors, setting)
        rows += [
            Row(f"{name}: save() blocks the script", ours.blocked_s, "s", theirs.blocked_s, STOCK, note),
            Row(f"{name}: durable", ours.whole_s, "s", theirs.whole_s, STOCK, note),
        ]
        del tensors
        gc.collect()
        torch.cuda.empty_cache()
    return rows


def dcp_cost(tensors: dict[str, torch.Tensor], setting: Setting) -> Cost:
    stager = DefaultStager(
        StagingOptions(
            use_pinned_memory=True, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=True
        )
    )
    costs = []
    for number in range(1 + setting.repeats):
        cost, directory = Cost(), setting.directory / f"dcp-{number}"
        began = time.perf_counter()
        with blocking(cost):
            future = dcp.async_save(tensors, checkpoint_id=directory, async_stager=stager, no_dist=True)
        future.result(SAVED_WITHIN_S)
        cost.whole_s = time.perf_counter() - began
        costs.append(cost)
        shutil.rmtree(directory)
    stager.close()
    return medians(costs[1:])


class Holder(torch.nn.Module):
    """A model that is nothing but its parameters."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self.register_parameter(name, torch.nn.Parameter(tensor, requires_grad=False))


def manage(model: torch.nn.Module, run_dir: Path, **options: Any) -> Any:
    """Make what a script makes; the only place here that knows how."""
    from stepkeeper_trainer import CheckpointManager  # noqa: PLC0415

    return CheckpointManager(state={"model": model}, run_dir=run_dir, every=1_000_000, **options)


def manager_cost(tensors: dict[str, torch.Tensor], setting: Setting) -> Cost:
    run_dir = setting.directory / "run"
    manager = manage(Holder(tensors), run_dir, retention="newest 1")
    manager.resume()
    costs = []
    for step in range(1, 3 + setting.repeats):  # the first prepares, the second is laid out by file
        manager.step_done()
        cost = Cost()
        began = time.perf_counter()
        with blocking(cost):
            manager.save()
        wait_for(run_dir / "checkpoints" / f"step_{step:08d}")
        cost.whole_s = time.perf_counter() - began
        costs.append(cost)
    manager.finish()
    shutil.rmtree(run_dir)
    return medians(costs[2:])


def wait_for(path: Path) -> None:
    end = time.monotonic() + SAVED_WITHIN_S
    while not path.exists():
        if time.monotonic() > end:
            raise TimeoutError(f"{path} was not committed in {SAVED_WITHIN_S:.0f} s")
        time.sleep(0.002)


def hashing(setting: Setting) -> list[Row]:
    """The hash of a tensor on the device, as ranks compare what they hold alike."""
    size = setting.bytes_of(4 * GIB)
    tensor = torch.rand(size // 4, device="cuda")
    copy = torch.empty_like(tensor)
    hashed = tensor.nbytes / median_s(lambda: hash_rows(tensor), setting.repeats) / 1e9
    copied = tensor.nbytes / median_s(lambda: copy.copy_(tensor), setting.repeats) / 1e9
    return [Row("hashing on the device", hashed, "GB/s", copied, "a copy within the device", f"{size / GIB:.1f} GiB")]


def full_device(setting: Setting) -> list[Row]:
    """A save while 99 % of the device's memory is taken: nothing is copied within it."""
    tensors = state_of(*SHAPES["300 x 64 MiB"], setting.bytes_of(8 * GIB))
    total = sum(tensor.nbytes for tensor in tensors.values())
    roomy = staging_cost(tensors, setting.repeats, overlap=False)
    gc.collect()
    torch.cuda.empty_cache()
    free, memory = torch.cuda.mem_get_info()
    ballast = torch.empty(max(0, free - memory // 100), dtype=torch.uint8, device="cuda")
    full = staging_cost(tensors, setting.repeats, overlap=False)
    note = f"{total / GIB:.1f} GiB of state, {torch.cuda.mem_get_info()[0] / GIB:.1f} GiB free"
    del ballast
    return [
        Row("a full device: script blocked", full.blocked_s, "s", roomy.blocked_s, "with room", note),
        Row("a full device: device blocked", full.stream_s, "s", roomy.stream_s, "with room", note),
        Row("a full device: in the host's memory", full.whole_s, "s", roomy.whole_s, "with room", note),
    ]


def load(setting: Setting) -> list[Row]:
    """A resume of 20 GiB, every byte checked, against `dcp.load`, which checks none."""
    tensors = state_of(320, 64 * MIB, setting.bytes_of(20 * GIB, disk=2))
    total = sum(tensor.nbytes for tensor in tensors.values())
    model, run_dir = Holder(tensors), setting.directory / "load"
    manager = manage(model, run_dir)
    manager.resume()
    manager.step_done()
    manager.save()
    manager.finish()
    step = run_dir / "checkpoints" / "step_00000001"
    state = {f"model.{name}": parameter for name, parameter in model.state_dict().items()}
    theirs = median_s(lambda: dcp.load(state, checkpoint_id=step, no_dist=True), max(1, setting.repeats // 2))
    ours = []
    for _ in range(1 + setting.repeats // 2):
        manager = manage(model, run_dir, resume_from=step)
        ours.append(seconds(manager.resume))
        manager.finish()
        del manager
        gc.collect()
    note = f"{total / GIB:.1f} GiB, from the page cache"
    return [Row("load", statistics.median(ours), "s", theirs, "dcp.load", note)]


def step_overhead(setting: Setting) -> list[Row]:
    """What `step_done` adds to a step."""
    model = Holder({"w": torch.rand(1 << 20, device="cuda")})
    manager = manage(model, setting.directory / "steps")
    manager.resume()
    loss = torch.tensor(1.5, device="cuda")
    took = []
    for _ in range(2000):
        loss.mul_(1.0)
        began = time.perf_counter()
        manager.step_done(loss=loss)
        took.append(time.perf_counter() - began)
    manager.finish()
    tail = sorted(took)[math.floor(0.99 * len(took))]
    return [Row("step_done", 1e6 * statistics.median(took[100:]), "us", note=f"99 % of them below {1e6 * tail:.0f} us")]


PARTS: dict[str, Callable[[Setting], list[Row]]] = {
    "copy": copy_rate,
    "registration": registration,
    "staging": staged_saves,
    "saves": whole_saves,
    "hashing": hashing,
    "full": full_device,
    "load": load,
    "step": step_overhead,
}

if __name__ == "__main__":
    sys.exit(main())
