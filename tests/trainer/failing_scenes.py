"""Saves of two ranks that come to nothing, or nearly: scenes for `test_failed_saves`.

Each rank knows beforehand how each save ends, so both go through the same ones.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from stepkeeper_trainer import CheckpointManager
from stepkeeper_trainer.save import commit
from stepkeeper_trainer.save.save import Save
from stepkeeper_trainer.store.guard import Backoff
from stepkeeper_trainer.tiers import TierError, uploader
from stepkeeper_trainer.tiers.tier import Tiers

LIMIT_S = 60.0


def until(condition: Callable[[], object], what: str) -> None:
    limit_at = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < limit_at, what
        time.sleep(0.01)


class Disk:
    """What this rank's fsyncs of data files meet: nothing, an error, or a gate."""

    def __init__(self) -> None:
        self.error: int | None = None
        self.where = ""  # in the path
        self.gate: threading.Event | None = None
        self.reached = threading.Event()
        sync = os.fsync

        def faulty(descriptor: int) -> None:
            path = os.readlink(f"/proc/self/fd/{descriptor}")
            if ".distcp" in path and self.where in path:
                if self.gate is not None:
                    self.reached.set()
                    assert self.gate.wait(LIMIT_S)
                if self.error is not None:
                    raise OSError(self.error, os.strerror(self.error))
            sync(descriptor)

        os.fsync = faulty

    @contextmanager
    def failing(self, number: int = errno.EIO, *, where: str = "") -> Iterator[None]:
        self.error, self.where = number, where
        yield
        self.error, self.where = None, ""

    @contextmanager
    def held(self) -> Iterator[None]:
        self.gate = threading.Event()
        self.reached.clear()
        yield
        self.gate.set()
        self.gate = None


class Rank:
    """A training of two ranks, with disks of their own nodes where `disks` says so."""

    def __init__(self, rank: int, directory: Path, *, disks: str = "", **options: Any) -> None:
        self.rank, self.disk = rank, Disk()
        os.environ["SLURMD_NODENAME"] = "n0" if disks == "one" else f"n{rank}"
        local = directory / ("disk" if disks == "one" else f"disk{rank}")
        tiers = Tiers(local=str(local)) if disks else None
        if disks:
            local.mkdir(exist_ok=True)
        self.model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 1))
        fully_shard(self.model[0])
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.manager = CheckpointManager(
            {"model": self.model, "optimizer": self.optimizer},
            run_dir=directory / "run",
            save_within_s=LIMIT_S,
            retention="all",
            storage_test="off",
            tiers=tiers,
            **({"every": None} | options),
        )
        self.manager.resume()
        self.manager._guard._backoff = Backoff(first_s=0.01, longest_s=0.01)
        self.uploader: uploader.Uploader | None = self.saver._uploader

    @property
    def saver(self) -> Any:
        return self.manager._saver

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            self.model(torch.rand(4, 64)).sum().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.manager.step_done(loss=1.0)

    def save(self) -> Save:
        """Begin a save of a new step, and return it."""
        self.step()
        self.manager.save()
        return self.saver.last  # type: ignore[no-any-return]

    def ends(self, save: Save) -> str | None:
        """Wait until a save is through with this rank, on its way to shared storage too; return what went wrong."""
        assert save.settled.wait(LIMIT_S), "it has no end"
        if self.uploader is None or save.error is not None:
            return save.error
        upload = self.uploader.last
        assert upload is not None
        assert upload.save_id == save.save_id
        assert upload.settled.wait(LIMIT_S), "its copy has no end"
        return upload.error


def comes_to_nothing(rank: int, directory: Path, *, disks: str) -> int:
    """Each way in which a save ends without a commit; after each of them no disk has anything of it."""
    mine = Rank(rank, directory, disks=disks)

    def cancelled() -> str | None:
        with mine.disk.held():
            save = mine.save()
            assert mine.disk.reached.wait(LIMIT_S)
            dist.barrier()
            mine.saver.cancel("a test")
        return mine.ends(save)

    def cancelled_when_the_other_has_reported() -> str | None:
        if rank == 1:
            save = mine.save()
            assert save.settled.wait(LIMIT_S)
            dist.barrier()
            mine.saver.cancel("a test")
            return mine.ends(save)
        with mine.disk.held():
            save = mine.save()
            dist.barrier()
            mine.saver.cancel("a test")
        return mine.ends(save)

    def refused_by(number: int) -> str | None:
        if rank != number:
            return mine.ends(mine.save())
        with mine.disk.failing():
            return mine.ends(mine.save())

    def copied_by_nobody() -> str | None:
        """Complete on the disks; then rank 1 cannot copy."""

        def fails(*_: object, **__: object) -> None:
            raise TierError("a test")

        push, uploader.push = uploader.push, fails if rank == 1 else uploader.push  # type: ignore[assignment]
        assert mine.uploader is not None
        mine.uploader._retry_s = 0.001
        found = mine.ends(mine.save())
        uploader.push = push
        return found

    ways = [cancelled, cancelled_when_the_other_has_reported, lambda: refused_by(0), lambda: refused_by(1)]
    for way in ways * 2 + ([copied_by_nobody] if disks else []):
        error = way()
        assert error is not None or rank == 1, "rank 0 knows"
        dist.barrier()  # all ranks have given back what is theirs
        left = [str(path) for path in directory.rglob(".*step_*")]
        assert left == [], left
        dist.barrier()
    assert mine.ends(mine.save()) is None, "and the next one is made"
    dist.barrier()
    return 0


def let_go(save: Save, gate: threading.Event) -> None:
    """Open a gate once a save was given up."""
    until(lambda: save.cancelled is not None, "it was not given up")
    gate.set()


def takes_over(rank: int, directory: Path, *, disks: str) -> int:
    """An urgent save takes the place of the one in flight, which one rank has reported and the other is writing."""
    mine = Rank(rank, directory, disks=disks)
    assert mine.ends(mine.save()) is None
    mine.saver.estimate_ms = lambda _now: (1_000_000, 1000)  # the one in flight needs long, a new one does not
    requests = mine.manager._requests
    with mine.disk.held() if rank == 0 else mine.disk.failing(0, where="nowhere"):
        first = mine.save()
        if rank == 1:
            assert first.settled.wait(LIMIT_S)
        else:
            assert mine.disk.reached.wait(LIMIT_S)
        dist.barrier()
        requests.stop_asked, requests.deadline_asked = True, time.time() + 2 * LIMIT_S
        if mine.disk.gate is not None:
            threading.Thread(target=let_go, args=(first, mine.disk.gate), daemon=True).start()
        while not requests.stop_agreed:
            mine.step()
        code = mine.manager.finish()
    print(f"rank {rank}: {first.cancelled is not None} {first.error}", flush=True)
    dist.barrier()
    return code


def commits_as_it_is_cancelled(rank: int, directory: Path) -> int:
    """Rank 0 is past its last look at what was cancelled: the save is committed, and nobody is the worse for it."""
    mine = Rank(rank, directory)
    gate, inside = threading.Event(), threading.Event()
    fence = commit.Commits.check_fence

    def held(self: commit.Commits) -> None:
        inside.set()
        assert gate.wait(LIMIT_S)
        fence(self)

    commit.Commits.check_fence = held  # type: ignore[method-assign]
    first = mine.save()
    if rank == 0:
        assert inside.wait(LIMIT_S)
    dist.barrier()
    mine.saver.cancel("a test")
    gate.set()
    print(f"rank {rank}: {mine.ends(first)}", flush=True)
    dist.barrier()
    print(f"rank {rank}: {mine.ends(mine.save())}", flush=True)
    dist.barrier()
    return 0


def disk_fills_up(rank: int, directory: Path, *, disks: str) -> int:
    """Rank 1's disk takes nothing more in the middle of a save: its files go to shared storage at once."""
    mine = Rank(rank, directory, disks=disks)
    assert mine.ends(mine.save()) is None
    if rank == 1:
        with mine.disk.failing(errno.ENOSPC, where=f"/disk{'' if disks == 'one' else rank}/"):
            assert mine.ends(mine.save()) is None
    else:
        assert mine.ends(mine.save()) is None
    dist.barrier()
    left = [str(path) for path in directory.rglob(".*step_*")]
    assert left == [], left
    dist.barrier()
    assert mine.ends(mine.save()) is None
    dist.barrier()
    return 0
