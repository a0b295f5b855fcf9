"""A load from end to end: plan, then read and copy on threads."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stepkeeper_trainer.load.plan import Task, plan
from stepkeeper_trainer.load.worker import Load, Worker

if TYPE_CHECKING:
    from pathlib import Path

    from stepkeeper_trainer.formats.manifest import Manifest
    from stepkeeper_trainer.load.plan import Wanted


THREADS_MIN, THREADS_MAX = 2, 16  # of a page cache, more readers than cores only take the caches of each other
MEMORY_BYTES = 1024 * 1024 * 1024  # beyond the tensors themselves


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a load may take."""

    threads: int | None = None  # None: by the number of cores
    memory_bytes: int = MEMORY_BYTES  # beyond the tensors; one chunk and one row of a tensor are always possible

    def count_threads(self) -> int:
        """Return how many threads read."""
        if self.threads is not None:
            return max(1, self.threads)
        return min(THREADS_MAX, max(THREADS_MIN, len(os.sched_getaffinity(0))))


def fill(
    directory: Path, manifest: Manifest, wanted: list[Wanted], *, limits: Limits | None = None, turn: float = 0.0
) -> int:
    """Copy what is wanted out of a step directory, and return how many bytes were read.

    Args:
        directory: the step directory.
        manifest: of it.
        wanted: what to copy, and where to.
        limits: threads and memory.
        turn: in [0, 1): where in the work to begin.  Ranks of a node that read the same begin at different places:
            what one has read is in the page cache for the others.

    Raises:
        DamagedError: some byte is not what the manifest says, or cannot be read.  Targets may be filled in part.
    """
    limits = limits or Limits()
    load = Load(directory, manifest, limits.memory_bytes)
    tasks = list(plan(directory, manifest, [item for item in wanted if item.target.numel()], load.layouts))
    cut = int(turn * len(tasks))
    _run(load, tasks[cut:] + tasks[:cut], limits.count_threads())
    return load.bytes_read


def _run(load: Load, tasks: list[Task], threads_max: int) -> None:
    """Carry out tasks on threads.  Raises what the first one to fail raised."""
    queue, lock = iter(tasks), threading.Lock()

    def work() -> None:
        worker = Worker(load)
        try:
            while not load.failed():
                with lock:
                    task = next(queue, None)
                if task is None:
                    return
                worker.carry_out(task)
        except BaseException as error:  # noqa: BLE001  # raised again by the calling thread
            load.fail(error)
        finally:
            worker.close()

    count = min(threads_max, len(tasks))
    threads = [threading.Thread(target=work, name=f"load-{i}", daemon=True) for i in range(count - 1)]
    for thread in threads:
        thread.start()
    work()
    for thread in threads:
        thread.join()  # none waits for longer than one chunk takes to read, once there is an error
    if load.error is not None:
        raise load.error
