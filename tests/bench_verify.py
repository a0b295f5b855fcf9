"""`make bench-verify`: deep verification of each framework's format against `cat` of the same files, in one process.

Warm: both from the page cache.  Cold: the cached pages of the files were dropped before each (`POSIX_FADV_DONTNEED`
after a sync).  The two alternate, and the ratio is that of the medians: of time, and in brackets of processor time,
which other work on the machine changes less.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import statistics
import subprocess
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from stepkeeper.frameworks import recognise, verify
from stepkeeper.frameworks.choosing import How, State, judge
from stepkeeper_trainer.formats import safetensors
from stepkeeper_trainer.formats.reading import Reading
from tests.frameworks import layouts

LIMIT_S = 600.0
TARGET = 0.9
STEP = 100
TENSORS = 4000  # of "many tensors"


class Taken(NamedTuple):
    wall_s: float
    cpu_s: float


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure deep verification of other frameworks' checkpoints.")
    parser.add_argument("--mib", type=int, default=256, help="size of each checkpoint (default: 256)")
    parser.add_argument("--repeats", type=int, default=5, help="of each measurement (default: 5)")
    parser.add_argument("--directory", type=Path, default=Path("/var/tmp"), help="where they are written")
    parser.add_argument("--cold", action="store_true", help="also from the disk")
    options = parser.parse_args()
    ways = ["warm", "cold"] if options.cold else ["warm"]
    isal = verify._crc32 is not zlib.crc32
    print(f"{options.mib} MiB each, medians of {options.repeats}, {len(os.sched_getaffinity(0))} cores, "
          f"load average {os.getloadavg()[0]:.1f} before it began\n")  # fmt: skip
    columns = [f"{way}, {crc}" for way in ways for crc in ("ISA-L", "zlib") if isal or crc == "zlib"]
    print("| | " + " | ".join((*columns, "cat, GiB/s")) + " |\n" + "|---" * (len(columns) + 2) + "|")
    for name, build in FORMATS.items():
        with tempfile.TemporaryDirectory(dir=options.directory, prefix="bench-verify-") as directory:
            framework, path = build(Path(directory), options.mib * 2**20)
            os.sync()
            cells, rate = [], 0.0
            for column in columns:
                way, _, crc = column.partition(", ")
                with _crc32(crc):
                    cat, own = _measure(framework, path, options.repeats, cold=way == "cold")
                cells.append(f"{cat.wall_s / own.wall_s:.2f}x ({cat.cpu_s / own.cpu_s:.2f}x)")
                if way == "warm":
                    rate = max(rate, options.mib / 1024 / cat.wall_s)
            print(f"| {name} | {' | '.join(cells)} | {rate:.1f} |", flush=True)
    print(f"\nThe target is {TARGET}x.")


@contextlib.contextmanager
def _crc32(which: str) -> Iterator[None]:
    found = verify._crc32
    if which == "zlib":
        verify._crc32 = zlib.crc32
    try:
        yield
    finally:
        verify._crc32 = found


def _measure(framework: str, path: Path, repeats: int, *, cold: bool) -> tuple[Taken, Taken]:
    adapter = recognise.known()[framework]
    [step] = [step for step in adapter.list_steps(path.parent) if step.path == path]
    files = [path] if path.is_file() else [each for each in sorted(path.rglob("*")) if each.is_file()]
    how = How(environment={}, deep=True, cached=False, world_size=None, reading=Reading())

    def deep() -> None:
        found = judge(adapter, step, how)
        assert found.state is State.VERIFIED, found.problems
        assert found.deep is not None
        assert found.deep.bytes_read > 0.99 * sum(each.stat().st_size for each in files)

    def cat() -> None:
        with open(os.devnull, "wb") as nowhere:
            subprocess.run(["cat", *files], stdout=nowhere, check=True, timeout=LIMIT_S)

    taken: dict[Callable[[], None], list[Taken]] = {cat: [], deep: []}
    for call in (cat, deep):
        call()
    for repeat in range(repeats):
        for call in (cat, deep) if repeat % 2 else (deep, cat):
            if cold:
                _drop(files)
            began, cpu = time.perf_counter(), _cpu_s()
            call()
            taken[call].append(Taken(time.perf_counter() - began, _cpu_s() - cpu))
    return _median(taken[cat]), _median(taken[deep])


def _median(taken: list[Taken]) -> Taken:
    return Taken(statistics.median(each.wall_s for each in taken), statistics.median(each.cpu_s for each in taken))


def _cpu_s() -> float:
    times = os.times()
    return time.process_time() + times.children_user + times.children_system


def _drop(files: list[Path]) -> None:
    for path in files:
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def _random(size: int) -> torch.Tensor:
    return torch.randn(size // 4)


def _lightning(root: Path, size: int) -> tuple[str, Path]:
    state = {"state_dict": {str(i): _random(size // 8) for i in range(8)}, "optimizer_states": [{}], "loops": {}}
    layouts.save(root / "last.ckpt", {**state, "global_step": STEP})
    return "lightning", root / "last.ckpt"


def _deepspeed(root: Path, size: int) -> tuple[str, Path]:
    path = layouts._engine(root / f"global_step{STEP}", STEP, stage=1, world=4)
    for each in path.glob("*_optim_states.pt"):
        layouts.save(each, {"state": _random(size // 4)})
    return "deepspeed", path


def _dcp(tensors: int) -> Callable[[Path, int], tuple[str, Path]]:
    def build(root: Path, size: int) -> tuple[str, Path]:
        path = root / "run-100"
        state = {f"optim.{i}": _random(size // tensors) for i in range(tensors)}
        layouts.save_dcp(path, {"model": {"a": layouts.tensor()}, **state})
        return "dcp", path

    return build


def _accelerate(root: Path, size: int) -> tuple[str, Path]:
    path = layouts.accelerate(root, STEP)
    header = safetensors.pack_header([(str(i), "float32", (size // 8 // 4,)) for i in range(8)], {})
    data = _random(size // 8).numpy().tobytes()
    (path / "model.safetensors").write_bytes(header + data * 8)
    return "accelerate", path


def _megatron(root: Path, size: int) -> tuple[str, Path]:
    path = layouts.megatron(root, STEP)
    state = {f"optimizer.{i}": _random(size // 8) for i in range(8)}
    layouts.save_dcp(path, state)
    digests = {each.name: hashlib.sha256(each.read_bytes()).hexdigest() for each in sorted(path.iterdir())}
    layouts.write(path / "integrity.json", json.dumps({"algorithm": "sha256", "files": digests}))
    return "megatron", path


FORMATS: dict[str, Callable[[Path, int], tuple[str, Path]]] = {
    "`torch.save`, 1 file (Lightning)": _lightning,
    "`torch.save`, 4 files (DeepSpeed)": _deepspeed,
    "DCP, 1 file, 8 tensors (torchtitan, FSDP)": _dcp(8),
    f"DCP, 1 file, {TENSORS} tensors": _dcp(TENSORS),
    "safetensors, 1 file (Accelerate, Hugging Face)": _accelerate,
    "DCP, 1 file, SHA-256 (Megatron with `integrity.json`)": _megatron,
}


if __name__ == "__main__":
    main()
