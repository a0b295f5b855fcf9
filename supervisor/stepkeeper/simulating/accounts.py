"""Where the time and the nodes of a simulated run go."""

from __future__ import annotations

from stepkeeper.seeing.model import Use
from stepkeeper.simulating.result import Result
from stepkeeper.simulating.world import World


class Accounts:
    """Of one run; every second of the clock is in one use, every node-hour held or not."""

    def __init__(self, result: Result, world: World, named: int) -> None:
        """Begin at 0; `named` is how many names the nodes of a launch have."""
        self._result, self._world, self._named = result, world, named
        self.use = Use.STARTING
        self._since = 0.0
        self._held_since = 0.0

    def spend(self, now: float, use: Use) -> None:
        """From now on time goes into this."""
        self._result.spent[self.use] += now - self._since
        self.use, self._since = use, now

    def lost(self, seconds: float) -> None:
        """So much of what seemed productive has to be done again."""
        self._result.spent[Use.PRODUCTIVE] -= seconds
        self._result.spent[Use.LOST] += seconds

    def held(self, now: float, names: int) -> None:
        """Nodes of so many names were held up to now."""
        nodes = self._world.nodes * min(1.0, names / self._named) + max(0, names - self._named)
        self._result.held_node_s += nodes * (now - self._held_since)
        self._held_since = now
