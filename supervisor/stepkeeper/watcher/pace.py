"""What a node's ranks work themselves for a step: their words, reduced to one every few seconds, of the slowest."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from stepkeeper.watcher import messages as bus
from stepkeeper_trainer.formats.messages import Progress

EVERY_S = 15.0
WORDS_MAX = 256  # of a rank, between two of ours


class Own(NamedTuple):
    """What a rank works itself for a step, in seconds."""

    seconds: float
    loading: float = 0.0  # of them, before the first forward


class NodePace:
    """Takes the ranks' words, and has one of its own now and then."""

    def __init__(self, node: str) -> None:
        self._node = node
        self._launch = ""
        self._step = 0
        self._own: dict[int, deque[Own]] = {}  # by rank
        self._steps: deque[float] = deque(maxlen=WORDS_MAX)
        self._said_at = 0.0

    def take(self, message: Progress) -> None:
        """Take in a rank's word; those of an older launch are forgotten with the first of a newer one."""
        if message.own_seconds is None or message.step_seconds is None:
            return
        if message.launch != self._launch:
            self._launch, self._own = message.launch, {}
            self._steps.clear()
        self._step = message.step
        words = self._own.setdefault(message.rank, deque(maxlen=WORDS_MAX))
        words.append(Own(message.own_seconds, message.loading_seconds or 0.0))
        self._steps.append(message.step_seconds)

    def words(self, now: float) -> Iterator[bus.Paced]:
        """Yield the word that is due at `now` (monotonic seconds), if any."""
        if now - self._said_at < EVERY_S or not self._own:
            return
        self._said_at = now
        rank, own = slowest({rank: _median(words) for rank, words in self._own.items()})
        yield bus.Paced(
            node=self._node,
            launch=self._launch,
            step=self._step,
            step_seconds=statistics.median(self._steps),
            own_seconds=round(own.seconds, 6),
            rank=rank,
            loading_seconds=round(own.loading, 6),
        )
        self._own = {}
        self._steps.clear()


def slowest(owns: Mapping[int, Own]) -> tuple[int, Own]:
    """Return the rank that works longest: all others wait for it.

    Rank 0 also logs and prints between its steps, which looks like loading; that of its neighbours is taken for it.

    >>> slowest({0: Own(1.5, 1.0), 1: Own(0.6, 0.1), 2: Own(0.7, 0.1)})
    (2, Own(seconds=0.7, loading=0.1))
    """
    known = dict(owns)
    others = [own.loading for rank, own in owns.items() if rank]
    if 0 in known and others:
        loading = min(known[0].loading, statistics.median(others))
        known[0] = Own(known[0].seconds - known[0].loading + loading, loading)
    return max(known.items(), key=lambda item: item[1].seconds)


def _median(words: deque[Own]) -> Own:
    return Own(statistics.median(each.seconds for each in words), statistics.median(each.loading for each in words))
