"""Ranks that use a CheckpointManager rightly and wrongly: scenes for `test_interface`."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from stepkeeper_trainer import CheckpointManager, StepkeeperError
from tests.trainer import old_parts

UNEVEN_AT = 3


def _manager(directory: Path, **options: Any) -> tuple[torch.nn.Module, torch.optim.Optimizer, CheckpointManager]:
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    manager = CheckpointManager(
        {"model": model, "optimizer": optimizer},
        run_dir=directory,
        storage_test="off",
        **({"every": None, "save_within_s": 3.0} | options),
    )
    manager.resume()
    return model, optimizer, manager


def _step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    loss = model(torch.rand(4, 8)).square().mean()
    loss.backward()
    total = loss.detach().clone()
    dist.all_reduce(total)
    optimizer.step()
    optimizer.zero_grad()


def uneven(rank: int, directory: Path, *, others: list[int], method: str) -> int:
    """Some ranks call another method after the third step, while the rest go on; say after how long each hears."""
    model, _, manager = _manager(directory)
    for _ in range(UNEVEN_AT):
        model(torch.rand(4, 8)).sum().backward()
        manager.step_done()
    dist.barrier()
    began_at = time.monotonic()
    try:
        if rank in others:
            getattr(manager, method)()
            if method == "save":
                manager.step_done()
        for _ in range(3):
            manager.step_done()
    except StepkeeperError as error:
        print(f"rank {rank} after {time.monotonic() - began_at:.1f} s: {error}", flush=True)
        return error.exit_code
    return 0


def _go_on(rank: int, manager: CheckpointManager) -> int:
    """Do some steps; print the error that ends them, and return its exit code."""
    try:
        for _ in range(3):
            manager.step_done()
    except StepkeeperError as error:
        print(f"rank {rank}: {error}", flush=True)
        return error.exit_code
    return 0


def late(rank: int, directory: Path, *, who: int, seconds: float) -> int:
    """One rank does not come to its second step for so long."""
    _, _, manager = _manager(directory)
    manager.step_done()
    if rank == who:
        time.sleep(seconds)
        return 0
    return _go_on(rank, manager)


class _Value:
    """A part of the state that cannot always be saved."""

    def __init__(self, value: Any = 0) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        if isinstance(self.value, Exception):
            raise self.value
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


def refused_on_one_rank(rank: int, directory: Path, *, when: str) -> int:
    """Rank 1 has what cannot be saved: when the manager resumes, or only after the first step.  It ends late."""
    value = _Value(range(3) if rank == 1 and when == "resume" else 0)
    began_at = time.monotonic()
    try:
        manager = CheckpointManager({"box": value}, run_dir=directory, storage_test="off", every=None)
        manager.resume()
        value.value = range(3) if rank == 1 else 1
        manager.step_done()
    except StepkeeperError as error:
        print(f"rank {rank} after {time.monotonic() - began_at:.1f} s: {error}", flush=True)
        if rank == 1:
            time.sleep(20.0)  # as a script that ends its trackers
        return error.exit_code
    return 0


def no_state_for_a_while(rank: int, directory: Path) -> int:
    """The state of rank 1 cannot be had at one save; training goes on, and the next save is complete."""
    value = _Value()
    manager = CheckpointManager({"box": value}, run_dir=directory, storage_test="off", every=None, save_within_s=60.0)
    manager.resume()
    for step in range(1, 4):
        value.value = RuntimeError("no index yet") if (rank, step) == (1, 2) else step
        manager.step_done()
        manager.save()  # where one is in flight, it waits for it first
    return manager.finish()


def one_ends(rank: int, directory: Path) -> int:
    """Rank 1 ends at once, as a process that is killed does."""
    _, _, manager = _manager(directory)
    manager.step_done()
    if rank == 1:
        os._exit(9)
    return _go_on(rank, manager)


def signalled(rank: int, directory: Path) -> int:
    """Rank 0 hangs before its second step until the script's own signal handler has ended the wait of the others."""
    _, _, manager = _manager(directory)
    manager.step_done()
    ended = [directory / f"ended-{other}" for other in range(1, dist.get_world_size())]
    if rank == 0:
        limit_at = time.monotonic() + 100
        while not all(path.exists() for path in ended):
            if time.monotonic() > limit_at:
                return 1
            time.sleep(0.1)
        return 0

    def leave(number: int, _frame: object) -> None:
        raise InterruptedError(number)

    signal.signal(signal.SIGUSR1, leave)
    threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGUSR1)).start()
    try:
        while True:
            manager.step_done()
    except InterruptedError:
        ended[rank - 1].touch()
        return 0


def stopped(rank: int, directory: Path) -> None:
    """One rank gets a signal; all stop together, and leave as a script does."""
    model, optimizer, manager = _manager(directory, attach_signals=True, save_within_s=60.0)
    for step in manager.steps():
        _step(model, optimizer)
        if step == 1 and rank == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        manager.step_done(loss=1.0)
    code = manager.finish()
    total = torch.ones(1)
    dist.all_reduce(total)  # the script's own groups are still there
    assert total.item() == dist.get_world_size()
    dist.destroy_process_group()
    sys.exit(code)


def goes_on_from_old_parts(rank: int, directory: Path, *, start: str = "latest") -> int:
    """Resume a step of the old interface, train a step, save it, and resume that; say what each rank has."""

    def manager(parts: dict[str, Any], resume_from: str, steps: int) -> CheckpointManager:
        made = CheckpointManager(
            parts, run_dir=directory, resume_from=resume_from, total_steps=steps, every=None, storage_test="off"
        )
        made.resume()
        return made

    def tell(what: str, parts: dict[str, Any]) -> None:
        print(f"{what} on {rank}: {json.dumps(old_parts.digests(parts))}", flush=True)

    parts = old_parts.build(2, rank)
    try:
        first = manager(parts, start, old_parts.STEPS + 1)
    except StepkeeperError as error:
        print(error, flush=True)
        return error.exit_code
    tell("resumed", parts)
    for _ in first.steps():
        first.step_done(loss=old_parts.step(parts))
    tell("saved", parts)
    assert first.finish() == 0
    parts = old_parts.build(3, rank)
    second = manager(parts, "latest", old_parts.STEPS + 1)
    tell("again", parts)
    return second.finish()
