"""Ranks that save and load sharded tensors: `python -m tests.trainer.sharded save|load|load-from-memory DIRECTORY`.

In memory each rank has a directory of its own, `DIRECTORY/nR`.
A rank that finds damage prints `damaged: …` and ends with 3.
"""

from __future__ import annotations

import sys
import warnings
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from stepkeeper_trainer.coordinate.ending import leave
from stepkeeper_trainer.coordinate.groups import new_group
from stepkeeper_trainer.errors import DamagedError
from stepkeeper_trainer.formats.manifest import read_manifest
from stepkeeper_trainer.load.from_memory import MemoryReader
from stepkeeper_trainer.load.reader import CheckedReader, load
from tests.trainer.steps_by_dcp import commit


def whole() -> dict[str, torch.Tensor]:
    """The same on every rank."""
    torch.manual_seed(1)
    return {
        "rows": torch.randn(101, 257),
        "columns": torch.randn(129, 301),
        "deep": torch.randn(7, 33, 65),
        "fewer rows than ranks": torch.randn(2, 1000),
        "replicated": torch.randn(70_000),
        "plain": torch.randn(300),
    }


def sharded(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Cut as a mixture of parallel strategies would."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    cuts = {"columns": Shard(1), "deep": Shard(2), "replicated": Replicate()}
    return {
        name: value if name == "plain" else distribute_tensor(value, mesh, [cuts.get(name, Shard(0))])
        for name, value in tensors.items()
    }


def main(what: str, directory: Path) -> int:
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", timeout=timedelta(seconds=180))
    if what == "save":
        dcp.save(sharded(whole()), checkpoint_id=directory)  # type: ignore[arg-type]
        dist.barrier()
        if dist.get_rank() == 0:
            commit(directory, chunk_bytes=10_000)
        return 0
    found = sharded({name: torch.zeros_like(value) for name, value in whole().items()})
    group = new_group(180)
    try:
        if what == "load":
            reader = CheckedReader(directory, read_manifest(directory))
        else:
            own = directory / f"n{dist.get_rank()}"
            manifest = read_manifest(own)
            here = frozenset(name for name in manifest.files if (own / name).exists())
            reader = MemoryReader.begin(own, manifest, here, group)
        load(reader, found, group)
    except DamagedError as error:
        print(f"damaged: {error}", flush=True)
        return 3
    for name, value in sharded(whole()).items():
        own, expected = found[name], value
        if hasattr(own, "to_local"):
            own, expected = own.to_local(), expected.to_local()  # type: ignore[attr-defined]
        assert torch.equal(own, expected), name
    return 0


if __name__ == "__main__":
    code = main(sys.argv[1], Path(sys.argv[2]))
    dist.destroy_process_group()
    leave(code)
