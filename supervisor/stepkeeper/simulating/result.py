"""What came of one simulated run."""

from __future__ import annotations

import msgspec

from stepkeeper.seeing.model import Use
from stepkeeper.simulating.world import Kind


class Result(msgspec.Struct, kw_only=True):
    """What came of one simulated run.  Seconds of the clock."""

    wall_s: float = 0.0
    steps_s: float = 0.0  # that all steps which count would take with all nodes
    held_node_s: float = 0.0  # seconds that nodes were held, in sum
    spent: dict[Use, float] = msgspec.field(default_factory=lambda: dict.fromkeys(Use, 0.0))
    happened: dict[Kind, int] = msgspec.field(default_factory=lambda: dict.fromkeys(Kind, 0))
    hits: int = 0  # failures that ended a launch, or kept one from its first step
    launches: int = 0
    attempts: int = 0
    persons: int = 0  # times that the run stopped, and a person was needed
    saves: int = 0
    stopped_for: list[str] = msgspec.field(default_factory=list)

    @property
    def ettr(self) -> float:
        """Productive time over all time; see `seeing.model.Accounts.ettr`."""
        return self.spent[Use.PRODUCTIVE] / self.wall_s

    @property
    def speed(self) -> float:
        """Steps, as a share of those that all nodes would have done in all the time; without `nodes_min` the ETTR."""
        return self.steps_s / self.wall_s

    @property
    def restart_s(self) -> float:
        """Mean time from a failure to the next first step, the first start left out."""
        away = sum(self.spent[use] for use in (Use.HUNG, Use.STOPPING, Use.STARTING, Use.QUEUE))
        first = away / (self.launches or 1) if not self.hits else 0.0
        return (away - first) / self.hits if self.hits else 0.0
