"""Ranks that are connected as a tree: scenes for `test_groups`."""

from __future__ import annotations

import time
from pathlib import Path

import torch
import torch.distributed as dist

from stepkeeper_trainer import CheckpointManager
from stepkeeper_trainer.coordinate import groups
from stepkeeper_trainer.coordinate.agreement import Agreement, Proposal
from stepkeeper_trainer.errors import LateError
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


def begins_again(rank: int, directory: Path, *, size: int) -> int:
    """Begin torch.distributed anew: rank 0 has made groups of ours before, as a process that outlived the others."""
    dist.destroy_process_group()
    if rank == 0:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        assert groups.new_group(60.0) is not None
        dist.destroy_process_group()
    directory.mkdir(parents=True, exist_ok=True)
    dist.init_process_group("gloo", store=dist.FileStore(str(directory / "again"), size), rank=rank, world_size=size)
    return talks(rank, directory, size=size)


def is_late(rank: int, _directory: Path) -> int:
    """Ask for collectives of the main thread, while the thread of the agreement waits for the last rank's message."""
    groups.FAN_OUT = FAN_OUT
    store = dist.distributed_c10d._get_default_store()
    agreement = Agreement(groups.new_group(60.0), within_s=60.0)
    if rank == LATE:
        store.wait(["refused/0", "refused/1"])
    agreement.issue(Proposal(request_id=rank))
    if rank != LATE:
        agreement.within_s = 0.2
        try:
            assert agreement.idle_group is None, "its message is on the way"
        except LateError:
            agreement.within_s = 60.0
            store.set(f"refused/{rank}", "")
    group = agreement.idle_group
    assert group is not None
    assert group.all_gather(rank) == [0, 1, LATE]
    assert agreement.read(Proposal).request_id == LATE
    agreement.close()
    return 0


def closes(rank: int, _directory: Path) -> int:
    """End the group while the other rank's message is still to come: torch would wait for it."""
    store = dist.distributed_c10d._get_default_store()
    agreement = Agreement(groups.new_group(60.0), within_s=0.2)
    if rank == 1:
        store.wait(["closed"])
        agreement.within_s = 60.0
    agreement.issue(Proposal(request_id=1))
    if rank == 1:
        assert agreement.read(Proposal).request_id == 1
        store.set("answered", "")
        agreement.close()
        return 0
    try:
        agreement.read(Proposal)
    except LateError:
        agreement.close()
        store.set("closed", "")
        store.wait(["answered"])
        return 0
    return 1
