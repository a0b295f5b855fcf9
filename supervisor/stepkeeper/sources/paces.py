"""The watchers' words on what their ranks work for a step, put together: one event for all nodes."""

from __future__ import annotations

import statistics

from stepkeeper.core import events as on
from stepkeeper.watcher import messages as lines

SLOWEST_TOLD = 4  # nodes


class Paces:
    """Collects a round of words; it is over when a node speaks again."""

    def __init__(self) -> None:
        self._launch = -1
        self._heard: dict[str, lines.Paced] = {}

    def receive(self, word: lines.Paced, launch: int, at: float) -> on.NodesPaced | None:
        """Take in a word; return the round that is over with it.

        Args:
            word: of a watcher.
            launch: of the attempt, that it tells of.
            at: Unix seconds.
        """
        event = None
        if launch != self._launch:
            self._launch, self._heard = launch, {}
        elif word.node in self._heard:
            said = self._heard.values()
            slowest = sorted((each for each in said if each.rank is not None), key=lambda each: -each.own_seconds)
            event = on.NodesPaced(
                at=at,
                launch=launch,
                step=max(each.step for each in said),
                step_seconds=statistics.median(each.step_seconds for each in said),
                own=tuple(sorted((each.node, each.own_seconds) for each in said)),
                loading=statistics.median_low(each.loading_seconds for each in said),
                slowest=tuple((each.node, each.rank or 0, each.loading_seconds) for each in slowest[:SLOWEST_TOLD]),
            )
            self._heard = {}
        self._heard[word.node] = word
        return event
