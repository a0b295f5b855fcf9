"""The watcher's part of a shared verification: read its shard, say how far it is, and what was found."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec

from stepkeeper.watcher import messages as bus
from stepkeeper_trainer.formats.messages import shorten
from stepkeeper_trainer.formats.reading import Reading
from stepkeeper_trainer.formats.verify import verify_shard

SAY_EVERY_S = 1.0
WAITING_MAX = 64  # shards that were asked for and not begun: far more than are ever sent at once
MIB = 2**20


class ShardReader:
    """One thread that reads one shard after the other."""

    def __init__(self, checkpoints: Path, node: str, say: Callable[[bus.FromWatcher], None]) -> None:
        """`say` is called on threads of this reader."""
        self._checkpoints = checkpoints
        self._node = node
        self._say = say
        self._wanted: queue.Queue[bus.Read] = queue.Queue(WAITING_MAX)
        self._number = 0  # of the newest verification: what belongs to an older one is dropped
        self._dropped = -1
        threading.Thread(target=self._run, name="shard-reader", daemon=True).start()

    def read(self, wanted: bus.Read) -> None:
        """Read a shard, after those that were asked for before; what belongs to an older verification is dropped."""
        self._number = max(self._number, wanted.number)
        try:
            self._wanted.put_nowait(wanted)
        except queue.Full:
            self._fail(wanted, "too many shards wait already")

    def drop(self, number: int) -> None:
        """Read no more for this verification and those before."""
        self._dropped = max(self._dropped, number)

    def _is_old(self, wanted: bus.Read) -> bool:
        return wanted.number < self._number or wanted.number <= self._dropped

    def _run(self) -> None:
        while True:
            wanted = self._wanted.get()
            try:
                if not self._is_old(wanted):
                    self._read(wanted)
            except Exception as error:  # noqa: BLE001 - reported; the supervisor has the shard read by another
                self._fail(wanted, repr(error))

    def _fail(self, wanted: bus.Read, error: str) -> None:
        self._say(msgspec.structs.replace(self._read_so_far(wanted, 0), done=True, error=shorten(error)))

    def _read_so_far(self, wanted: bus.Read, count: int) -> bus.ShardRead:
        return bus.ShardRead(node=self._node, number=wanted.number, index=wanted.index, of=wanted.of, bytes_read=count)

    def _read(self, wanted: bus.Read) -> None:
        far = _Far()
        over = threading.Event()
        reading = Reading(
            bytes_per_s=wanted.mib_per_s * MIB or None,
            from_disk=wanted.from_disk,
            first_only=True,
            should_stop=lambda: self._is_old(wanted),
            on_read=far.add,
        )
        progress = threading.Thread(
            target=self._say_how_far, args=(wanted, far, over), name="shard-progress", daemon=True
        )
        progress.start()
        try:
            found = verify_shard(self._checkpoints / wanted.directory, wanted.index, wanted.of, reading=reading)
        finally:
            over.set()
            progress.join()
        if self._is_old(wanted):
            return
        self._say(
            msgspec.structs.replace(
                self._read_so_far(wanted, found.bytes_read),
                done=True,
                problem=shorten(found.problems[0]) if found.problems else "",
                problems=len(found.problems),
                manifest=found.manifest,
                seen=found.seen,
                began_at=found.began_at,
            )
        )

    def _say_how_far(self, wanted: bus.Read, far: _Far, over: threading.Event) -> None:
        """Say it at once, so that the supervisor knows that it arrived, and then every second."""
        while True:
            self._say(self._read_so_far(wanted, far.bytes))
            if over.wait(SAY_EVERY_S):
                return


class _Far:
    """How many bytes all threads of a shard have read."""

    def __init__(self) -> None:
        self.bytes = 0
        self._lock = threading.Lock()

    def add(self, count: int) -> None:
        with self._lock:
            self.bytes += count
