"""Ranks that are connected as a tree: scenes for `test_groups`."""

from __future__ import annotations

import time
from pathlib import Path

import torch

from stepkeeper_trainer import CheckpointManager
from stepkeeper_trainer.coordinate import groups
from tests.trainer.ending_scenes import finishes

FAN_OUT = 2
STEPS = 4
LATE, LATE_S = 2, 15.0


def talks(rank: int, _directory: Path, *, size: int, fan_out: int = FAN_OUT) -> int:
    """Use each collective of a group once, and those of another group behind it."""
    groups.FAN_OUT = fan_out
    for _ in range(2):
        group = groups.new_group(60.0)
        assert group is not None
        numbers = torch.tensor([rank, -rank, 7])
        group.reduce_max(numbers, 30.0)
        assert numbers.tolist() == [size - 1, 0, 7]
        begun = torch.tensor([rank])
        if (work := group.start_reduce_max(begun, lambda: True)) is not None:
            work.wait()
        assert begun.tolist() == [size - 1]
        values = [(each, b"x" * 1000 * each) for each in range(size)]
        assert group.gather(values[rank]) == (values if rank == 0 else None)
        assert group.scatter(values if rank == 0 else None) == values[rank]
        assert group.broadcast(f"of rank {rank}") == "of rank 0"
        assert group.all_gather(rank) == list(range(size))
        members = groups.find_members()
        assert len(members) == len(group.levels)
        assert all(str(rank) in each for each in members.values())
        group.close()
    assert groups.find_members() == {}
    return 0


def trains(rank: int, directory: Path, *, steps: int) -> int:
    """Train to a step, saving every second one; each rank has a generator of its own."""
    groups.FAN_OUT = FAN_OUT
    torch.manual_seed(rank)
    model = torch.nn.Linear(8, 8)
    with torch.no_grad():
        model.weight.fill_(0.5)
        model.bias.zero_()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    manager = CheckpointManager(
        {"model": model, "optimizer": optimizer},
        every="2 steps",
        run_dir=directory,
        resume_from="latest",
        total_steps=steps,
        storage_test="off",
    )
    manager.resume()
    while not manager.finished:
        noise = torch.rand(4)
        model(torch.full((4, 8), float(manager.step))).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        manager.step_done(loss=float(model.weight.sum()))
        manager.wait_saved(60.0)
        print(f"rank {rank}: step {manager.step}: {float(model.weight.sum())!r} {noise.tolist()!r}", flush=True)
    return manager.finish()


def leaves(rank: int, directory: Path) -> int | None:
    """End the script behind a step that the last rank has not done: what was said of it waits in a thread."""
    groups.FAN_OUT = FAN_OUT
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    manager = CheckpointManager(
        {"model": model, "optimizer": optimizer}, every=None, run_dir=directory, storage_test="off"
    )
    manager.resume()
    for step in range(STEPS):
        if rank == LATE and step == STEPS - 1:
            time.sleep(LATE_S)
        model(torch.ones(4, 8)).sum().backward()
        optimizer.step()
        manager.step_done(loss=1.0)
        assert manager._saver is not None
        manager._saver.wait_prepared(time.time() + 60.0)  # its thread talks to the other ranks, too
    return 0 if rank == LATE else None


def ends(rank: int, directory: Path, *, hit: str, who: int) -> int:
    """Finish, while rank `who` is killed."""
    groups.FAN_OUT = FAN_OUT
    return finishes(rank, directory, hit=hit, who=who)
