"""Ranks that stand still in real collectives: `python -m tests.trainer.stuck_ranks DIRECTORY SCENE...`.

Forks three ranks for each scene from one process that has torch already, prints their pids as one line of JSON, and
ends them when its stdin is closed.  A rank answers from `DIRECTORY/SCENE`.
"""

from __future__ import annotations

import ctypes
import faulthandler
import json
import os
import signal
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from stepkeeper_trainer.formats import collectives as accounts
from stepkeeper_trainer.observe import collectives

WORLD = 3
LATE = 2  # the rank that does something else
FOREVER_S = 3600


def waits_alone(rank: int) -> None:
    """All but one enter the third all_reduce of 4x5."""
    for _ in range(2):
        dist.all_reduce(torch.ones(7))
    if rank == LATE:
        time.sleep(FOREVER_S)
    dist.all_reduce(torch.ones(4, 5))


def ahead(rank: int) -> None:
    """Two ranks have begun three collectives at once, of which the late one has entered the first."""
    works = [dist.all_reduce(torch.ones(7), async_op=True) for _ in range(1 if rank == LATE else 3)]
    works[0].wait()
    path = accounts.nccl_dump_file(Path(sys.argv[1]) / "ahead", rank)
    path.with_suffix(".part").write_bytes(torch._C._distributed_c10d._dump_fr_trace())
    path.with_suffix(".part").rename(path)
    time.sleep(FOREVER_S) if rank == LATE else works[-1].wait()


def disagrees(rank: int) -> None:
    """One broadcasts where the others reduce."""
    dist.all_reduce(torch.ones(7))
    dist.broadcast(torch.ones(7), src=0) if rank == LATE else dist.all_reduce(torch.ones(7))
    dist.barrier()


def in_a_group(rank: int) -> None:
    """Rank 1 waits for rank 2 in a group of these two, and rank 0 for both in the one of all."""
    pair = dist.new_group([1, LATE], group_desc="tp")
    if rank:
        dist.all_reduce(torch.ones(3), group=pair)
    if rank == LATE:
        time.sleep(FOREVER_S)
    dist.barrier(group=pair) if rank else dist.all_reduce(torch.ones(3))


def deaf(rank: int) -> None:
    """One is stuck in native code that keeps the interpreter's lock."""
    dist.all_reduce(torch.ones(7))
    if rank == LATE:
        mutex = ctypes.create_string_buffer(64)  # zeros are an open one
        for _ in range(2):
            ctypes.PyDLL(None).pthread_mutex_lock(mutex)  # no signal ends it
    dist.all_reduce(torch.ones(7))


def done(rank: int) -> None:
    """Every collective has ended; one computes on."""
    dist.all_reduce(torch.ones(7))
    time.sleep(FOREVER_S if rank else 2 * FOREVER_S)


SCENES = {each.__name__: each for each in (waits_alone, ahead, disagrees, in_a_group, deaf, done)}


def play(directory: Path, scene: str, rank: int) -> None:
    """Be one rank."""
    place = directory / scene
    dist.init_process_group(
        "gloo", init_method=f"file://{place}/store", rank=rank, world_size=WORLD, timeout=timedelta(seconds=FOREVER_S)
    )
    faulthandler.register(accounts.STACKS_SIGNAL, file=(place / f"{rank}.txt").open("w"), chain=False)
    collectives.listen_for_collectives(place, rank)
    SCENES[scene](rank)


def main() -> None:
    directory, scenes = Path(sys.argv[1]), sys.argv[2:]
    pids: dict[str, dict[int, int]] = {}
    try:
        for scene in scenes:
            (directory / scene / accounts.STACKS_DIRECTORY).mkdir(parents=True)
            pids[scene] = {}
            for rank in range(WORLD):
                pid = os.fork()
                if pid == 0:
                    try:
                        play(directory, scene, rank)
                    except Exception:  # noqa: BLE001 - it is a process of its own
                        traceback.print_exc()
                    finally:
                        os._exit(1)
                pids[scene][rank] = pid
        print(json.dumps(pids), flush=True)
        sys.stdin.read()
    finally:
        for pid in [pid for ranks in pids.values() for pid in ranks.values()]:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


if __name__ == "__main__":
    main()
