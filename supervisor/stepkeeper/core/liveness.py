"""Whether a peer that sends messages regularly is alive, suspect or gone: one rule for all who wait for others.  Pure.

The supervisor judges its watchers by it, and each watcher its supervisor.  Silence makes a peer suspect, and only
`GONE_AFTER_S` of silence makes it gone.  A hint (a closed pipe, a signal) makes it suspect early and never gone: what
follows from a suspicion costs a living peer nothing.  One message of the peer ends every suspicion.

Seconds are those of the caller's monotonic clock.  Time in which the caller did not run itself is nobody's silence.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec
from msgspec.structs import replace

EVERY_S = 5.0  # a judged process sends a message at least so often
SUSPECT_AFTER_S = 12.0  # two messages in a row are missing
# Longer than a supervisor takes to give up a node (suspect, then `watcher_back_within`): a process that alone is cut
# off from the others must not act for them before they have gone on without it.
GONE_AFTER_S = 60.0


class Life(StrEnum):
    """What can be said of a peer."""

    ALIVE = "alive"
    SUSPECT = "suspect"
    GONE = "gone"


class Peer(msgspec.Struct, frozen=True):
    """One whose messages we wait for."""

    last_message_at: float
    hint_at: float | None = None  # from then on it is suspect, unless a message comes before

    def received(self, at: float) -> Peer:
        """A message came: it is alive, whatever was suspected."""
        return Peer(at)

    def hinted(self, at: float) -> Peer:
        """Something says that it may be gone: from `at` on it is suspect."""
        return replace(self, hint_at=at if self.hint_at is None else min(at, self.hint_at))

    def paused(self, seconds: float, at: float) -> Peer:
        """We did not run for so long until `at`: nothing that was sent meanwhile could be received."""
        hint_at = None if self.hint_at is None else self.hint_at + seconds
        return Peer(min(at, self.last_message_at + seconds), hint_at)

    def life(self, at: float) -> Life:
        """Tell whether it is alive."""
        silent_s = at - self.last_message_at
        if silent_s >= GONE_AFTER_S:
            return Life.GONE
        hinted = self.hint_at is not None and at >= self.hint_at
        return Life.SUSPECT if hinted or silent_s >= SUSPECT_AFTER_S else Life.ALIVE

    @property
    def suspect_at(self) -> float:
        """When it becomes suspect."""
        late_at = self.last_message_at + SUSPECT_AFTER_S
        return late_at if self.hint_at is None else min(late_at, self.hint_at)
