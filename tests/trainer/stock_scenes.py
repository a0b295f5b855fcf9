"""What `test_against_stock` plays with several ranks, or with processes that end: see `scenes`.

Each scene is played with stock DCP and with ours; where a scene has one variant only, the other is in `forked`.
"""

from __future__ import annotations

import concurrent.futures
import errno
import logging
import os
import signal
import threading
import time
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.distributed_c10d import _set_pg_timeout

from stepkeeper_trainer import CheckpointManager
from stepkeeper_trainer.save.planner import Planner

warnings.simplefilter("ignore")


def small_manager(directory: Path, **options: Any) -> CheckpointManager:
    model = torch.nn.Linear(8, 8)
    return CheckpointManager(
        {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)},
        run_dir=directory,
        **({"every": None} | options),
    )


def save_and_wait(manager: CheckpointManager) -> None:
    manager.save()
    assert manager.wait_saved(90)


class Falling(dcp.FileSystemWriter):
    """Sends this process a signal when its data are to be written."""

    signal: int | None = None

    def write_data(self, plan: Any, planner: Any) -> Any:
        if self.signal is not None:
            signal.pthread_kill(threading.get_ident(), self.signal)
        return super().write_data(plan, planner)


def killed_while_overwriting(rank: int, directory: Path) -> int:
    """Two saves into one directory; a rank dies in the second."""
    for value in (1.0, 2.0):
        writer = Falling(directory)
        if (rank, value) == (1, 2.0):
            writer.signal = signal.SIGKILL
        dcp.save({f"part.{rank}": torch.full((1000,), value)}, storage_writer=writer)
    return 0


def generators(rank: int, directory: Path, *, library: str) -> int:
    """Each rank has a random generator of its own, saves it, and takes it back."""
    manager = small_manager(directory) if library == "stepkeeper" else None
    if manager is not None:
        manager.resume()
    torch.manual_seed(100 + rank)
    if manager is not None:
        manager.step_done(loss=0.0)
        save_and_wait(manager)
        dist.barrier()  # rank 0 has committed
    else:
        dcp.save({"rng": torch.get_rng_state()}, checkpoint_id=directory)
    drawn = torch.rand(3)
    torch.manual_seed(7)
    if manager is not None:
        small_manager(directory, resume_from="latest").resume()
    else:
        found = {"rng": torch.get_rng_state()}
        dcp.load(found, checkpoint_id=directory)
        torch.set_rng_state(found["rng"])
    print(f"rank {rank}: {'the same' if torch.equal(torch.rand(3), drawn) else 'another'}")
    return 0


def interleaved(rank: int, directory: Path, *, library: str) -> int:
    """The ranks come to their collectives in another order: a save in its thread is late on one of them."""
    planned = threading.Event()
    if library == "stock":

        class Late(dcp.DefaultSavePlanner):
            def set_up_planner(self, *arguments: Any, **options: Any) -> None:
                time.sleep(1.0 if rank else 0.0)
                super().set_up_planner(*arguments, **options)

            def create_local_plan(self) -> Any:
                plan = super().create_local_plan()
                planned.set()
                return plan

        saved = dcp.async_save({"w": torch.ones(4)}, checkpoint_id=directory, planner=Late())
    else:
        agree = Planner.agree

        def late(self: Planner, *arguments: Any, **options: Any) -> Any:
            time.sleep(1.0 if rank else 0.0)
            return agree(self, *arguments, **options)

        Planner.agree = late  # type: ignore[method-assign]
        manager = small_manager(directory)
        manager.resume()
        manager.step_done(loss=0.0)
        manager.save()
        planned.set()
    assert rank or planned.wait(60)
    time.sleep(0.0 if rank else 0.5)
    total = torch.tensor([rank + 1.0])
    dist.all_reduce(total)  # of training
    print(f"rank {rank}: sum {total.item()}", flush=True)
    if library == "stock":
        saved.result()
    else:
        assert manager.wait_saved(90)
    print(f"rank {rank}: saved", flush=True)
    return 0


def late_once(rank: int, directory: Path) -> int:
    """A rank stands still for longer than the saves' group waits; then all is well again."""
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=60))
    for number in range(4):
        if number == 1:
            _set_pg_timeout(timedelta(seconds=1), group)
        writer = Falling(directory / str(number))
        if (rank, number) == (1, 1):
            writer.signal = signal.SIGSTOP
        try:
            dcp.async_save({f"part.{rank}": torch.ones(4)}, storage_writer=writer, process_group=group).result()
        except BaseException as error:  # noqa: BLE001  # DCP's own is one
            print(f"rank {rank}: save {number} failed: {str(error).splitlines()[0]}", flush=True)
        else:
            print(f"rank {rank}: save {number} good", flush=True)
        dist.barrier()  # of training: the ranks can talk
    return 0


def fails_in_the_background(rank: int, directory: Path, *, library: str) -> None:  # noqa: ARG001
    """A script that sets up no logging, as most do, saves to storage that refuses; then its work is over."""
    logging.root.handlers.clear()
    directory.mkdir()
    if library == "stock":
        (directory / "occupied").write_text("")
        for number in range(2):
            saved = dcp.async_save({"w": torch.ones(4)}, checkpoint_id=directory / f"occupied/{number}")
            concurrent.futures.wait([saved], timeout=60)
            assert saved.exception() is not None
        return
    manager = small_manager(directory)
    manager.resume()
    (directory / "checkpoints").rmdir()
    (directory / "checkpoints").write_text("")
    manager.step_done(loss=0.0)
    manager.save()
    assert manager._saver is not None
    assert not manager.wait_saved(90)
    assert not manager._saver.busy


def left_alone(rank: int, directory: Path, *, library: str) -> None:  # noqa: ARG001
    """The script ends while a save hangs in the storage."""

    sync = os.fsync

    def hang() -> None:
        time.sleep(1.5 if library == "stock" else 60.0)
        (directory / "waited").touch()

    def hanging(descriptor: int) -> None:
        if ".distcp" in os.readlink(f"/proc/self/fd/{descriptor}"):
            hang()
        sync(descriptor)

    directory.mkdir()
    if library == "stock":

        class Hanging(FileSystem):
            def create_stream(self, path: Any, mode: str) -> Any:
                hang()
                return super().create_stream(path, mode)

        writer = dcp.FileSystemWriter(directory / "step")
        writer.fs = Hanging()
        dcp.async_save({"w": torch.ones(4)}, storage_writer=writer)
        return
    os.fsync = hanging
    manager = small_manager(directory)
    manager.resume()
    manager.step_done(loss=0.0)
    manager.save()
    time.sleep(0.2)


def without_its_daemon(rank: int, directory: Path) -> int:
    """A save by DCP's process; then the kernel takes that process, as the OOM killer does."""
    import multiprocessing  # noqa: PLC0415

    from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType  # noqa: PLC0415

    store = dist.FileStore(str(directory.parent / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    for number in range(3):
        try:
            dcp.async_save(
                {"w": torch.ones(4)},
                checkpoint_id=directory / str(number),
                async_checkpointer_type=AsyncCheckpointerType.PROCESS,
            ).result()
            print(f"save {number} good", flush=True)
        except BaseException as error:  # noqa: BLE001
            print(f"save {number} failed: {error!r:.200}", flush=True)
        if number == 0:
            [daemon] = multiprocessing.active_children()
            daemon.kill()
            daemon.join()
    return 0


def no_daemon(rank: int, directory: Path) -> int:  # noqa: ARG001
    """Our saves, one of which fails."""
    manager = small_manager(directory)
    manager.resume()
    sync = os.fsync
    for number in range(3):
        manager.step_done(loss=0.0)
        os.fsync = _failing if number == 1 else sync
        manager.save()
        print(f"save {number} {'good' if manager.wait_saved(90) else 'failed'}", flush=True)
    children = "".join(path.read_text() for path in Path("/proc/self/task").glob("*/children"))
    print(f"children: {children.split()}", flush=True)
    return 0


def _failing(_descriptor: int) -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO))
