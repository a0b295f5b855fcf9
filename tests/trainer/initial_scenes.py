"""Initial weights for sharded models of several ranks: scenes for `test_initial_weights`."""

from __future__ import annotations

import warnings
from pathlib import Path

import safetensors.torch
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from stepkeeper_trainer import CheckpointManager, StepkeeperWriter
from stepkeeper_trainer.errors import StepkeeperError
from stepkeeper_trainer.load.reader import ALONE
from tests.trainer import worlds

PLACES = {"plain": "plain", "safetensors": "model.safetensors", "writer": "first/checkpoints/step_00000001"}


def save(rank: int, directory: Path, *, kind: str) -> int:  # noqa: ARG001
    """Save what each name holds, by another program."""
    warnings.simplefilter("ignore")
    model, optimizer = worlds.build(1)
    worlds.fill(model, optimizer)
    state = model.state_dict()
    if kind == "plain":
        dcp.save({"model": state}, checkpoint_id=directory / "plain", **ALONE)
    elif kind == "writer":
        dcp.save({"model": state}, storage_writer=StepkeeperWriter(directory / "first", step=1), **ALONE)
    else:
        safetensors.torch.save_model(model, str(directory / PLACES[kind]))
    return 0


def begin(rank: int, directory: Path, *, kind: str) -> int:
    """Begin a run on several ranks."""
    model, optimizer = worlds.build(dist.get_world_size())
    manager = CheckpointManager(
        {"model": model, "optimizer": optimizer},
        every=None,
        run_dir=directory / "run",
        resume_from=directory / PLACES[kind],
    )
    try:
        assert manager.resume() == 0
    except StepkeeperError as error:
        print(f"rank {rank}: {error}", flush=True)
        return error.exit_code
    bad = []
    for name, value in model.state_dict().items():
        whole = value.full_tensor() if hasattr(value, "full_tensor") else value
        wanted = worlds.bits("embedding.weight" if name == "head.weight" else name, tuple(whole.shape), whole.dtype)
        if not worlds.equal(whole, wanted):
            bad.append(name)
    assert isinstance(model.embedding.weight, torch.Tensor)
    print(f"rank {rank}: wrong: {bad}", flush=True)
    return int(bool(bad))
