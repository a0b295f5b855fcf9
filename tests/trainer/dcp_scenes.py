"""Saves and loads by plain `torch.distributed.checkpoint`, with our reader and writer (`test_dcp_storage`)."""

from __future__ import annotations

import inspect
import os
import signal
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from stepkeeper_trainer import StepkeeperReader, StepkeeperWriter
from stepkeeper_trainer.load.reader import root_cause
from tests.trainer import worlds

STEP = 7
FLATTENS_TIED = "no_dist" in inspect.signature(dcp.load).parameters
"""Whether `set_state_dict` loads what `get_state_dict` has flattened of tied parameters: torch 2.6 cannot."""
EXTRA = {"epoch": 3, "names": ["a", "b"], "rate": 0.25}


def _built(*, filled: bool) -> tuple[worlds.Net, torch.optim.Optimizer]:
    warnings.simplefilter("ignore")
    model, optimizer = worlds.build(dist.get_world_size() if dist.is_initialized() else 1)
    worlds.fill(model, optimizer)
    if not filled:
        with torch.no_grad():
            for value in (*model.parameters(), *(v for each in optimizer.state.values() for v in each.values())):
                value.zero_()
            model.seen.zero_()  # type: ignore[operator]
    return model, optimizer


def _state(model: worlds.Net, optimizer: torch.optim.Optimizer, *, flat: bool) -> dict[str, Any]:
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    own, optim = get_state_dict(model, optimizer, options=options)
    return {"model": own, "optim": optim}


def save(rank: int, directory: Path, *, flat: bool = FLATTENS_TIED, background: str = "", step: int = STEP) -> int:
    """Save by plain DCP with our writer."""
    model, optimizer = _built(filled=True)
    state = _state(model, optimizer, flat=flat) | {"own": EXTRA, "each": {f"rank{rank}": torch.full((3,), rank)}}
    writer = StepkeeperWriter(directory, step=step, loss=1.5)
    if background:
        group = dist.new_group(backend="gloo")
        future = dcp.async_save(state, storage_writer=writer, process_group=group, **_kind(background))
        future.result(timeout=60)  # type: ignore[union-attr]
    else:
        dcp.save(state, storage_writer=writer)
    return 0


def _kind(background: str) -> dict[str, Any]:
    """An older torch knows threads only."""
    kinds = getattr(torch.distributed.checkpoint.state_dict_saver, "AsyncCheckpointerType", None)
    return {} if kinds is None else {"async_checkpointer_type": kinds(background)}


def fsdp1(rank: int, directory: Path) -> int:
    """Train with FSDP1, save, and go on in fresh objects as in these: to the last bit."""
    from torch.distributed.fsdp import FullyShardedDataParallel  # noqa: PLC0415

    warnings.simplefilter("ignore")

    def built() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(1)
        body = torch.nn.Sequential(torch.nn.Linear(6, 12), torch.nn.Tanh(), torch.nn.Linear(12, 3))
        model = FullyShardedDataParallel(body, device_id=torch.device("cpu"), use_orig_params=True)
        return model, torch.optim.AdamW(model.parameters(), lr=0.01)

    def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
        losses = []
        for step in steps:
            torch.manual_seed(100 * rank + step)
            optimizer.zero_grad()
            loss = model(torch.randn(5, 6)).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    model, optimizer = built()
    train(model, optimizer, range(3))
    own, optim = get_state_dict(model, optimizer)
    dcp.save({"model": own, "optim": optim}, storage_writer=StepkeeperWriter(directory, step=3))
    expected = train(model, optimizer, range(3, 6))

    again, moments = built()
    train(again, moments, range(7, 8))  # what is loaded replaces all of it
    own, optim = get_state_dict(again, moments)
    state = {"model": own, "optim": optim}
    dcp.load(state, storage_reader=StepkeeperReader(directory / "checkpoints/step_00000003"))
    set_state_dict(again, moments, model_state_dict=state["model"], optim_state_dict=state["optim"])
    assert train(again, moments, range(3, 6)) == expected
    assert all(torch.equal(one, two) for one, two in zip(model.parameters(), again.parameters(), strict=True))
    return 0


def load(rank: int, directory: Path, *, flat: bool = FLATTENS_TIED, reader: str = "ours", manager: bool = False) -> int:
    """Load by plain DCP: what a writer or a manager has saved, with our reader or with stock's."""
    model, optimizer = _built(filled=False)
    optimizer.param_groups[0]["lr"] = 123.0
    state = _state(model, optimizer, flat=flat)
    if not manager:
        state["own"] = {"epoch": 0, "names": [], "rate": 0.0}
    else:
        state["optimizer"] = state.pop("optim")
    storage = StepkeeperReader(directory) if reader == "ours" else dcp.FileSystemReader(directory)
    try:
        dcp.load(state, storage_reader=storage)
    except CheckpointException as error:
        print(f"rank {rank}: refused: {root_cause(error)}", flush=True)
        return 3
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    optim = state["optimizer" if manager else "optim"]
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=optim, options=options)
    bad = worlds.wrong(model, optimizer)
    bad += [] if manager or state["own"] == EXTRA else [f"own: {state['own']}"]
    bad += [] if optimizer.param_groups[0]["lr"] == 0.01 else ["lr"]
    print(f"rank {rank}: wrong: {bad}", flush=True)
    return int(bool(bad))


class _Falling(StepkeeperWriter):
    """Kills its process at a point of the save."""

    point = ""

    def write_data(self, plan: Any, planner: Any) -> Any:
        self._fall("before writing")
        found = super().write_data(plan, planner)
        self._fall("after writing")
        return found

    def finish(self, metadata: Any, results: Any) -> None:
        self._fall("before the commit")
        super().finish(metadata, results)

    def _fall(self, point: str) -> None:
        if point == self.point:
            os.kill(os.getpid(), signal.SIGKILL)


def killed(rank: int, directory: Path, *, victim: int, point: str) -> int:
    """A save that succeeds, and one in which a rank dies."""
    save(rank, directory, step=1)
    model, optimizer = _built(filled=True)
    writer = _Falling(directory, step=2)
    writer.point = point if rank == victim else ""
    try:
        dcp.save(_state(model, optimizer, flat=True), storage_writer=writer)
    except (RuntimeError, CheckpointException) as error:
        print(f"rank {rank}: {type(error).__name__}", flush=True)
        return 3
    return 0


def failing(rank: int, directory: Path) -> int:
    """A save whose data one rank cannot write, and then one that succeeds, in the same processes."""
    save(rank, directory, step=1)
    model, optimizer = _built(filled=True)
    writer = StepkeeperWriter(directory, step=2)
    state = _state(model, optimizer, flat=True) | ({"code": _Code()} if rank == 1 else {})
    try:
        dcp.save(state, storage_writer=writer)
    except CheckpointException as error:
        print(f"rank {rank}: {root_cause(error)}", flush=True)
    del writer
    save(rank, directory, step=3)
    return 0


class _Code:
    """What only unpickling can load."""
