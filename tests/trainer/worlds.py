"""Saves of some number of ranks, loaded by another: scenes for `test_other_worlds`.

What a tensor holds follows from its name, so that whoever loads knows what must be there.
"""

from __future__ import annotations

import warnings
import zlib
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from stepkeeper_trainer import CheckpointManager
from stepkeeper_trainer.state import plain_name

KINDS = (
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.uint16,
    torch.bool,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)


def bits(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor of any bits that belong to a name; numbers that can be compared, for floats."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator, dtype=torch.uint8).bool()
    if dtype.is_floating_point or dtype.is_complex:
        wide = torch.float64 if not dtype.is_complex else torch.complex128
        return torch.randn(shape, generator=generator, dtype=wide).to(dtype)
    return torch.randint(0, 100, shape, generator=generator, dtype=torch.int64).to(dtype)


def equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    def raw(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().contiguous().reshape(-1).view(torch.uint8)

    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(raw(one), raw(other))


class Kinds:
    """A part of the script's own state: tensors of every kind and layout."""

    def __init__(self, tensors: dict[str, torch.Tensor] | None = None) -> None:
        self.tensors = tensors if tensors is not None else kinds()

    def state_dict(self) -> dict[str, object]:
        return {"tensors": self.tensors}

    def load_state_dict(self, state: dict[str, dict[str, torch.Tensor]]) -> None:
        self.tensors = state["tensors"]


def kinds() -> dict[str, torch.Tensor]:
    found = {str(dtype).removeprefix("torch."): bits(str(dtype), (5, 7), dtype) for dtype in KINDS}
    wide = bits("wide", (40, 30), torch.float32)
    shared = bits("shared", (1000,), torch.float32)
    return found | {
        "number": torch.tensor(2.5),
        "number of bfloat16": torch.tensor(1.5, dtype=torch.bfloat16),
        "empty": torch.zeros(0),
        "empty rows": torch.zeros(3, 0, dtype=torch.int32),
        "transposed": wide.t(),
        "every other": wide[::2, ::3],
        "expanded": bits("row", (1, 8), torch.float32).expand(6, 8),
        "one storage": shared,
        "its end": shared[900:],
        "one storage again": shared,
    }


class Net(nn.Module):
    """Uneven on every number of ranks, with tied weights, and types that differ."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(13, 10)
        self.body = nn.ModuleList([nn.Linear(10, 7), nn.Linear(7, 10, dtype=torch.bfloat16)])
        self.norm = nn.LayerNorm(1)  # fewer rows than ranks
        self.head = nn.Linear(10, 13, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("seen", torch.zeros(3, dtype=torch.int64))


def build(world_size: int) -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Net()
    if world_size > 1:
        for layer in model.body:
            fully_shard(layer)
        fully_shard(model)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def fill(model: Net, optimizer: torch.optim.Optimizer) -> None:
    """Give each parameter, moment and buffer what belongs to its name."""
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            _put(parameter, name)
            for key in ("exp_avg", "exp_avg_sq"):
                _put(optimizer.state[parameter][key], f"{name}.{key}")
        model.seen.copy_(bits("seen", (3,), torch.int64))  # type: ignore[operator]


def wrong(model: Net, optimizer: torch.optim.Optimizer) -> list[str]:
    """Return what does not hold what belongs to its name."""
    found = [] if equal(model.seen, bits("seen", (3,), torch.int64)) else ["seen"]  # type: ignore[arg-type]
    if model.head.weight is not model.embedding.weight:
        found.append("the tie")
    for name, parameter in model.named_parameters():
        values = {name: parameter} | {
            f"{name}.{key}": optimizer.state[parameter][key] for key in ("exp_avg", "exp_avg_sq")
        }
        for called, value in values.items():
            whole = value.full_tensor() if isinstance(value, DTensor) else value
            if not equal(whole, bits(plain_name(called), tuple(whole.shape), whole.dtype)):
                found.append(called)
    return found


def _put(tensor: torch.Tensor, name: str) -> None:
    whole = bits(plain_name(name), tuple(tensor.shape), tensor.dtype)
    if isinstance(tensor, DTensor):
        from torch.distributed.tensor import distribute_tensor  # noqa: PLC0415

        whole = distribute_tensor(whole, tensor.device_mesh, tensor.placements)
    tensor.copy_(whole)


def save(rank: int, directory: Path) -> int:  # noqa: ARG001
    model, optimizer = build(_world_size())
    manager = CheckpointManager(
        {"model": model, "optimizer": optimizer, "kinds": Kinds()}, every=None, run_dir=directory
    )
    manager.resume()
    fill(model, optimizer)
    manager.step_done(loss=1.0)
    manager.save()
    assert manager.wait_saved(90)
    if dist.is_initialized():
        dist.barrier()
    return 0


def load(rank: int, directory: Path) -> int:
    """Load by a manager."""
    model, optimizer = build(_world_size())
    own = Kinds({name: torch.zeros_like(value) for name, value in kinds().items()})
    manager = CheckpointManager(
        {"model": model, "optimizer": optimizer, "kinds": own},
        every=None,
        run_dir=directory.parent / f"of-{_world_size()}",
        resume_from=directory / "checkpoints/step_00000001",
    )
    assert manager.resume() == 1
    bad = wrong(model, optimizer) + [name for name, value in kinds().items() if not equal(own.tensors[name], value)]
    print(f"rank {rank}: wrong: {bad}", flush=True)
    return int(bool(bad))


def stock_load(rank: int, directory: Path) -> int:
    """Load by stock `torch.distributed.checkpoint.load`, into a model sharded over this many ranks."""
    warnings.simplefilter("ignore")
    model, optimizer = build(_world_size())
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    names = {parameter: name for name, parameter in model.named_parameters()}
    own = {name: torch.zeros(value.shape, dtype=value.dtype) for name, value in kinds().items()}
    state = {
        "model": model.state_dict(),
        "optimizer": {"state": {names[parameter]: value for parameter, value in optimizer.state.items()}},
        "kinds": {"tensors": own},
    }
    dcp.load(state, checkpoint_id=directory / "checkpoints/step_00000001")
    bad = wrong(model, optimizer) + [name for name, value in kinds().items() if not equal(own[name], value)]
    print(f"rank {rank}: wrong: {bad}", flush=True)
    return int(bool(bad))


def _world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1
