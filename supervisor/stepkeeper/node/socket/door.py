"""Who may come in, and how often a peer is heard.  Pure but for its memory of what was."""

from __future__ import annotations

from collections.abc import Collection

from stepkeeper.node.socket.connection import Connection
from stepkeeper.node.socket.jobs import ROOT
from stepkeeper.node.socket.limits import Bucket, Buckets, Limits


class Door:
    """Counts connections and messages.  Root is trusted, and always comes in."""

    def __init__(self, limits: Limits, now: float) -> None:
        self._limits = limits
        self.accepts = Bucket(limits.accepts_per_s, limits.accepts_burst, now)
        self._accepts_of = Buckets(limits.accepts_per_uid_per_s, limits.accepts_per_uid_burst, limits.uids_max)
        self._packets_of = Buckets(limits.packets_per_uid_per_s, limits.packets_per_uid_burst, limits.uids_max)

    def refusal(self, uid: int, now: float, inside: Collection[Connection]) -> str:
        """Return why a user may not come in, or nothing."""
        if uid == ROOT:
            return ""
        if not self._accepts_of.take(uid, now):
            return "too many connections in a short time"
        if sum(each.peer.uid == uid for each in inside) >= self._limits.connections_per_uid_max:
            return "too many connections of one user"
        if len(inside) >= self._limits.connections_max and self.makes_room(uid, inside) is None:
            return "too many connections"
        return ""

    def makes_room(self, uid: int, inside: Collection[Connection]) -> Connection | None:
        """Return the connection that has to leave for a new one: the oldest of those without a job here."""
        if uid == ROOT or len(inside) < self._limits.connections_max:
            return None
        return next((each for each in inside if each.job_id is None and not each.asking), None)

    def hears(self, connection: Connection, now: float) -> bool:
        """Count one message; False: it is one too many."""
        if not connection.rate.take(now):
            return False
        uid = connection.peer.uid
        return uid == ROOT or self._packets_of.take(uid, now)
