"""One way to save, measured in a training of its own: a rank of `tests.bench_checkpoint`.

Before each save the limits are measured in the same process: a warm copy of the same tensors, and `dd` with fsync.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import resource
import statistics
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from stepkeeper_trainer import CheckpointManager, start_distributed
from stepkeeper_trainer.coordinate.groups import new_group
from tests.ports import reserve

OURS, THREAD, PROCESS = "stepkeeper", "dcp.async_save, thread", "dcp.async_save, process"
UNPREPARED = "stepkeeper, planning included"
DCP, TORCH, SNAPSHOT, CHECKPOINTING = "dcp.save", "torch.save", "torchsnapshot", "torch_checkpointing"
WARM_STEPS, CALM_STEPS = 4, 12
LIMIT_S = 1200.0
Done = Callable[[], bool]
Figures = dict[str, float]


def main() -> None:
    parser = argparse.ArgumentParser()
    for name, kind in (("way", str), ("mib", int), ("tensors", int), ("saves", int), ("directory", Path)):
        parser.add_argument(f"--{name}", type=kind, required=True)
    parser.add_argument("--paused", action="store_true", help="no training beside")
    options = parser.parse_args()
    print(json.dumps(measure(options)), flush=True)
    os._exit(0)  # what torch has left running does not count


class Work:
    """A training whose every step works on all of the state, and on the interpreter too."""

    def __init__(self, mib: int, tensors: int, directory: Path, *, prepare: bool) -> None:
        self.place = start_distributed()
        torch.manual_seed(0)
        parameters = max(1, tensors // 4)  # AdamW has two moments and a count for each
        size = mib * 2**20 // (parameters * 3 * 4)
        self.model = torch.nn.ParameterList([torch.nn.Parameter(torch.randn(size)) for _ in range(parameters)])
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-6, foreach=True)
        for parameter in self.model:
            parameter.grad = torch.full_like(parameter, 1e-3)
        self.manager = CheckpointManager(
            {"model": self.model, "optimizer": self.optimizer},
            every=None,
            run_dir=directory / "run",
            retention="all",
            storage_test="off",
        )
        self.manager.resume()
        self.group = new_group(LIMIT_S)
        self.manager._prepared = not prepare  # the other ways do without its memory
        self.square = torch.rand(256, 256)

    def state(self) -> dict[str, Any]:
        """Return what is saved."""
        return {name: tensor.detach() for name, tensor in self.manager._state.collect().items()}

    def all_agree(self, *, one: bool) -> bool:
        """Say whether it is so on all ranks: they take as many steps as each other."""
        if self.place.world_size == 1:
            return one
        assert self.group is not None
        flag = torch.tensor([int(not one)])
        self.group.reduce_max(flag)
        return not flag

    def step(self) -> None:
        self.optimizer.step()
        for _ in range(10):
            self.square = (self.square @ self.square).softmax(0)
        sum(n * n for n in range(20_000))  # the interpreter's part of a step
        self.manager.step_done(loss=1.0)


class Limits:
    """A warm copy of the same tensors, and as many bytes through `dd` with fsync."""

    def __init__(self, work: Work, directory: Path) -> None:
        self._all_ready = work.all_agree
        self._state = [tensor for tensor in work.state().values() if tensor.numel()]
        self.bytes = sum(tensor.nbytes for tensor in self._state)
        share = self.bytes // max(1, work.place.world_size)
        self._mib = max(1, share >> 20)
        self._scale = share / (self._mib << 20)
        self._file = directory / f"dd.{work.place.rank}"

    def copy_s(self) -> float:
        """Return the seconds of a warm copy, one tensor after the other, on all ranks at once as in a save."""
        copies = [torch.empty_like(tensor) for tensor in self._state]
        triples = [(a.data_ptr(), b.data_ptr(), b.nbytes) for a, b in zip(copies, self._state, strict=True)]

        def copy() -> None:
            for triple in triples:
                ctypes.memmove(*triple)

        def one() -> float:
            self._all_ready(one=True)
            return timed(copy)

        copy()
        seconds = statistics.median(one() for _ in range(5))
        copies.clear()
        ctypes.CDLL(None).malloc_trim(0)  # else the allocator keeps them, and they look like memory that a save takes
        return seconds

    def write_s(self) -> float:
        """Return the seconds of writing this rank's share, with nothing beside it."""
        command = ["dd", "if=/dev/zero", f"of={self._file}", "bs=1M", f"count={self._mib}", "conv=fsync"]
        seconds = timed(lambda: subprocess.run(command, check=True, capture_output=True, timeout=LIMIT_S))
        self._file.unlink()
        return seconds * self._scale


def measure(options: argparse.Namespace) -> Figures:
    """Train and save; return what it cost, the first save apart from the later ones."""
    way, directory = options.way, options.directory
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # torch's process mode opens a file for each tensor
    if way == PROCESS and "RANK" not in os.environ:  # torch's process mode wants a group, if of one
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{reserve()}", rank=0, world_size=1)
    work = Work(options.mib, options.tensors, directory, prepare=way == OURS)
    for _ in range(WARM_STEPS):
        work.step()
    if way == OURS:
        # Made beside the first steps; the copies that are measured next must not have that beside them.
        assert work.manager._saver._prepared.wait(LIMIT_S), "no memory for saves"  # type: ignore[union-attr]
    limits = Limits(work, directory)
    rounds: list[Figures] = []
    for number in range(1 + options.saves):
        copy_s, write_s = limits.copy_s(), limits.write_s()
        os.sync()
        work.all_agree(one=True)
        calm = [timed(work.step) for _ in range(CALM_STEPS)]
        if not number:
            before = _forget_peak()
            for _ in range(2):
                work.step()
            before = max(before, _peak(os.getpid()))
            if way == OURS:
                before -= work.manager._saver._staging.arena.bytes  # type: ignore[union-attr]
        begin = begin_of(way, work, directory / f"{number}")
        _forget_peak()  # what the limits took does not count
        work.all_agree(one=True)  # as after a step that all ranks have done: none waits for another's calm steps
        one = _save(begin, work, statistics.median(calm), train=not options.paused)
        one["memory"] = _peak(os.getpid()) - before + sum(_peak(pid) for pid in _children())
        one |= {"copy_s": copy_s, "write_s": write_s}
        one["blocked"], one["slowed"] = one["blocked_s"] / copy_s, one["slowed_s"] / copy_s
        one["durable"] = write_s / one["durable_s"]
        rounds.append(one)
    memory = max(one.pop("memory") for one in rounds)
    first, *later = rounds
    figures = {name: statistics.median(one[name] for one in later) for name in first} if later else dict(first)
    return figures | {f"first {name}": value for name, value in first.items()} | {"memory": memory / limits.bytes}


def _save(begin: Callable[[], Done], work: Work, step_s: float, *, train: bool) -> Figures:
    """Save; return how long that blocked, how much it slowed training, and when it was durable."""
    started_at, cpu_at = time.perf_counter(), time.process_time()
    done = begin()
    blocked_s = slowed_s = time.perf_counter() - started_at
    while not work.all_agree(one=done()):
        if train:
            slowed_s += timed(work.step) - step_s
        else:
            time.sleep(0.001)
    return {
        "blocked_s": blocked_s,
        "slowed_s": max(0.0, slowed_s),
        "durable_s": time.perf_counter() - started_at,
        "cpu_s": time.process_time() - cpu_at,
    }


def begin_of(way: str, work: Work, path: Path) -> Callable[[], Done]:
    """Return what begins a save; that returns what tells whether it is durable."""
    if way in (OURS, UNPREPARED):
        return lambda: _ours(work)
    if way in (THREAD, PROCESS):
        return lambda: _stock(work, path, AsyncCheckpointerType.PROCESS if way == PROCESS else None)
    if way == SNAPSHOT:
        return lambda: _snapshot(work, path)
    if way == CHECKPOINTING:
        return lambda: _checkpointing(work, path)
    return lambda: _at_once(way, work, path)


def _ours(work: Work) -> Done:
    work.manager.save()
    saver = work.manager._saver
    assert saver is not None
    assert saver.last is not None
    last = saver.last

    def done() -> bool:
        """Whether it is durable: rank 0 has committed it, and nothing of the others' is waited for any more."""
        assert last.error is None, last.error
        return work.place.rank != 0 or saver.committed >= last.sequence or last.settled.is_set()

    return done


def _stock(work: Work, path: Path, kind: AsyncCheckpointerType | None) -> Done:
    if not hasattr(work, "stager"):  # one for all saves, as its documentation asks for
        work.stager = DefaultStager(StagingOptions(False, False, False, False))  # type: ignore[attr-defined]  # noqa: FBT003
    future: Any = dcp.async_save(
        work.state(),
        checkpoint_id=path,
        async_checkpointer_type=kind or AsyncCheckpointerType.THREAD,
        async_stager=work.stager,  # type: ignore[attr-defined]
        no_dist=work.place.world_size == 1 and kind is None,
    )
    return lambda: _ended(future)


def _snapshot(work: Work, path: Path) -> Done:
    import torchsnapshot  # type: ignore[import-not-found]  # noqa: PLC0415  # where it is installed

    pending = torchsnapshot.Snapshot.async_take(
        str(path), {"state": torchsnapshot.StateDict(**work.state())}, replicated=["**"]
    )

    def done() -> bool:
        if pending.done():
            pending.wait()
            return True
        return False

    return _and_synced(done, path)


def _checkpointing(work: Work, path: Path) -> Done:
    from torch_checkpointing import CheckpointManager  # type: ignore[import-not-found]  # noqa: PLC0415
    from torch_checkpointing.storage.filesystem import (  # type: ignore[import-not-found]  # noqa: PLC0415
        LocalFileSystemStorageConfig,
    )

    if not hasattr(work, "theirs"):
        config = CheckpointManager.Config.with_async_save()
        config.storage_config = LocalFileSystemStorageConfig(use_direct_io=False)  # with it, it fails: EINVAL
        work.theirs = config.build()  # type: ignore[attr-defined]
    future = work.theirs.save(str(path), {"state": work.state()})  # type: ignore[attr-defined]
    with work.theirs.lock():  # type: ignore[attr-defined]  # as before every optimizer step
        return _and_synced(lambda: _ended(future), path)


def _and_synced(done: Done, path: Path) -> Done:
    """Sync what was written by those who never do, in a thread beside training, once their writes have ended."""
    pool = ThreadPoolExecutor(1)
    syncing: list[Future[None]] = []

    def sync() -> None:
        for file in path.rglob("*"):
            number = os.open(file, os.O_RDONLY)
            os.fsync(number)
            os.close(number)

    def ended() -> bool:
        if not syncing and done():
            syncing.append(pool.submit(sync))
            pool.shutdown(wait=False)
        return bool(syncing) and _ended(syncing[0])

    return ended


def _ended(future: Any) -> bool:
    if future.done():
        future.result()
        return True
    return False


def _at_once(way: str, work: Work, path: Path) -> Done:
    if way == DCP:
        dcp.save(work.state(), checkpoint_id=path, no_dist=work.place.world_size == 1)
    else:
        path.mkdir(exist_ok=True)
        with (path / f"{work.place.rank}.pt").open("wb") as file:
            torch.save(work.state(), file)
            file.flush()
            os.fsync(file.fileno())
    return lambda: True


def timed(call: Callable[[], object]) -> float:
    started_at = time.perf_counter()
    call()
    return time.perf_counter() - started_at


def _forget_peak() -> int:
    """Have the kernel count the peak of this process anew; return what is resident."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status(os.getpid(), "VmRSS:")


def _peak(pid: int) -> int:
    return _status(pid, "VmHWM:")


def _status(pid: int, field: str) -> int:
    with suppress(FileNotFoundError, ProcessLookupError):  # it has ended
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith(field):
                return int(line.split()[1]) * 1024
    return 0


def _children() -> list[int]:
    found = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
    return [int(pid) for pid in found]


if __name__ == "__main__":
    main()
