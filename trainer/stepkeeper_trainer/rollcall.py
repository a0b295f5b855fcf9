"""Which ranks have ended while the last save is waited for: rank 0 then need not wait for what they never wrote.

Each rank says a word to rank 0 when it is through with its part, and rank 0 has asked for all words before it
waits.  The kernel closes the connections of a process that dies, so what was asked of it fails at once.  A node
without power closes nothing: `connections` finds that its kernel is silent.  A process that stands still is no dead
one, its kernel answers for it: there the limit of the save counts.
"""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from stepkeeper_trainer import connections
from stepkeeper_trainer.log import warn

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

GRACE_S = 10.0  # what a rank wrote right before it ended may be seen here so much later, on shared storage
LATE_S = 60.0  # words are waited for so much longer than what they tell of: a limit that passes fails the group
JOIN_WITHIN_S = 5.0
_TAG = 7_000_000  # of the first words; nothing else on the group has tags


class Ended:
    """The ranks that are known to have ended, and since when."""

    def __init__(self) -> None:
        self._since: dict[int, float] = {}  # time.monotonic()

    def note(self, rank: int) -> None:
        """Take note that a rank's process is gone."""
        self._since.setdefault(rank, time.monotonic())

    def __bool__(self) -> bool:
        return bool(self._since)

    def of(self, ranks: Iterable[int]) -> list[int]:
        """Return which of these ended long enough ago for all that they wrote to be seen."""
        until = time.monotonic() - GRACE_S
        return sorted(rank for rank in ranks if self._since.get(rank, float("inf")) <= until)


class RollCall:
    """Of one launch's end.  All ranks hold it equally often, each around a wait for the save."""

    def __init__(self, group: Any | None, ended: Ended) -> None:
        """Take the gloo group that the ranks agree by; None for a process alone.  `ended` hears who is gone."""
        self._group, self._ended = group, ended
        self._calls = 0
        self._sent: list[Any] = []  # what is on its way must stay
        self._threads: list[threading.Thread] = []

    @contextmanager
    def held(self, limit_at: float) -> Iterator[None]:
        """Hear meanwhile, on rank 0, who has ended; on another, say at the end that this rank has not."""
        tag = _TAG + self._calls
        self._calls += 1
        if self._group is None:
            yield
            return
        connections.probe()
        if dist.get_rank(self._group) == 0:
            self._listen(tag, limit_at)
            yield
        else:
            try:
                yield
            finally:
                self._say(tag)

    def close(self) -> None:
        """Wait for what hears, so that it does not outlive the group; a rank that stands still is not waited for."""
        limit_at = time.monotonic() + JOIN_WITHIN_S
        for thread in self._threads:
            thread.join(max(0.0, limit_at - time.monotonic()))

    def _listen(self, tag: int, limit_at: float) -> None:
        asked: list[tuple[int, Any, torch.Tensor]] = []
        for rank in range(1, dist.get_world_size(self._group)):
            word = torch.zeros(1, dtype=torch.int64)
            try:
                asked.append((rank, dist.irecv(word, src=rank, group=self._group, tag=tag), word))
            except RuntimeError as error:
                self._hear_end(rank, error)
        thread = threading.Thread(target=self._wait, args=(asked, limit_at), name="stepkeeper-rollcall", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _wait(self, asked: list[tuple[int, Any, torch.Tensor]], limit_at: float) -> None:
        """Wait for one after the other: a rank that is gone is found when those before it have had their say."""
        for rank, work, _ in asked:
            left_s = limit_at + LATE_S - time.time()
            if left_s <= 0:
                return
            try:
                work.wait(timedelta(seconds=left_s))
            except RuntimeError as error:
                if time.time() >= limit_at + LATE_S:
                    return  # it may be alive
                self._hear_end(rank, error)

    def _hear_end(self, rank: int, error: RuntimeError) -> None:
        self._ended.note(rank)
        warn("rank_lost", rank=rank, why=str(error).splitlines()[0])

    def _say(self, tag: int) -> None:
        word = torch.ones(1, dtype=torch.int64)
        try:
            self._sent.append((dist.isend(word, dst=0, group=self._group, tag=tag), word))
        except RuntimeError as error:
            warn("rank_lost", rank=0, why=str(error).splitlines()[0])
