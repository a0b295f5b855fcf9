"""What a node's ranks work themselves for a step: their words, reduced to one every few seconds."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterator

from stepkeeper.watcher import messages as bus
from stepkeeper_trainer.formats.messages import Progress

EVERY_S = 15.0
WORDS_MAX = 256  # of a rank, between two of ours


class NodePace:
    """Takes the ranks' words, and has one of its own now and then."""

    def __init__(self, node: str) -> None:
        self._node = node
        self._launch = ""
        self._step = 0
        self._own: dict[int, deque[float]] = {}  # by rank
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
        self._own.setdefault(message.rank, deque(maxlen=WORDS_MAX)).append(message.own_seconds)
        self._steps.append(message.step_seconds)

    def words(self, now: float) -> Iterator[bus.Paced]:
        """Yield the word that is due at `now` (monotonic seconds), if any."""
        if now - self._said_at < EVERY_S or not self._own:
            return
        self._said_at = now
        yield bus.Paced(
            node=self._node,
            launch=self._launch,
            step=self._step,
            step_seconds=statistics.median(self._steps),
            own_seconds=round(statistics.median(statistics.median(each) for each in self._own.values()), 6),
        )
        self._own = {}
        self._steps.clear()
