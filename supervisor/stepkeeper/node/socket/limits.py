"""How much of anything one user, or all of them, may have of the agent."""

from __future__ import annotations

from collections import OrderedDict

import msgspec
import structlog


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """One field a limit.  Rates are a second; a burst is what may come at once."""

    connections_max: int = 256
    connections_per_uid_max: int = 32
    backlog: int = 4096
    accepts_per_s: float = 10_000.0  # of all: whoever waits behind one who connects without end is served soon
    accepts_burst: float = 1000.0
    accepts_per_uid_per_s: float = 20.0
    accepts_per_uid_burst: float = 64.0
    packets_per_s: float = 5.0  # of one connection
    packets_burst: float = 20.0
    packets_per_uid_per_s: float = 50.0
    packets_per_uid_burst: float = 200.0
    unjoined_s: float = 10.0  # a connection that has not joined is closed then
    outgoing_max: int = 64  # messages that a peer has not read
    outgoing_stuck_s: float = 10.0  # how long the kernel may refuse to take the next one
    send_buffer_bytes: int = 32 * 1024
    uids_max: int = 4096  # users remembered in each table below; a user with subordinate uids has 65,536
    looks_per_uid_per_s: float = 0.1
    looks_per_uid_burst: float = 3.0
    looks_per_s: float = 1.0
    looks_burst: float = 10.0
    looks_waiting_max: int = 4  # of one connection
    look_within_s: float = 60.0
    questions_max: int = 32  # to Slurm, waiting
    questions_per_uid_max: int = 4
    questions_per_uid_per_s: float = 0.5
    questions_per_uid_burst: float = 5.0
    questions_per_s: float = 5.0
    questions_burst: float = 20.0
    answers_kept: int = 256
    answers_kept_s: float = 5.0
    hastens_per_uid_per_s: float = 0.1  # wishes that are new or changed: each costs Slurm calls
    hastens_per_uid_burst: float = 10.0
    jobs_max: int = 1024
    jobs_per_uid_max: int = 128
    log_lines_per_s: float = 1.0
    log_lines_burst: float = 20.0
    log_lines_per_uid_per_s: float = 0.2
    log_lines_per_uid_burst: float = 5.0


class Bucket:
    """A token bucket."""

    __slots__ = ("_at", "_burst", "_left", "_rate")

    def __init__(self, rate: float, burst: float, now: float) -> None:
        self._rate = rate
        self._burst = burst
        self._left = burst
        self._at = now

    def take(self, now: float) -> bool:
        """Take one token, if there is one."""
        self._left = min(self._burst, self._left + (now - self._at) * self._rate)
        self._at = now
        if self._left < 1.0:
            return False
        self._left -= 1.0
        return True


class Buckets:
    """One bucket a user.  The user seen longest ago is forgotten first, so memory stays bounded."""

    def __init__(self, rate: float, burst: float, uids_max: int) -> None:
        self._rate = rate
        self._burst = burst
        self._uids_max = uids_max
        self._of: OrderedDict[int, Bucket] = OrderedDict()

    def take(self, uid: int, now: float) -> bool:
        """Take one token of a user's, if there is one."""
        bucket = self._of.get(uid)
        if bucket is None:
            if len(self._of) >= self._uids_max:
                self._of.popitem(last=False)
            bucket = self._of[uid] = Bucket(self._rate, self._burst, now)
        self._of.move_to_end(uid)
        return bucket.take(now)


class BoundedLog:
    """Logs what users cause, at a bounded rate; the lines left out are counted in the next one."""

    def __init__(self, log: structlog.typing.FilteringBoundLogger, limits: Limits, now: float) -> None:
        self._log = log
        self._all = Bucket(limits.log_lines_per_s, limits.log_lines_burst, now)
        self._each = Buckets(limits.log_lines_per_uid_per_s, limits.log_lines_per_uid_burst, limits.uids_max)
        self._left_out = 0

    def room(self, now: float, uid: int) -> int | None:
        """Return how many lines were left out before this one; None where this one is left out too."""
        if not self._each.take(uid, now) or not self._all.take(now):
            self._left_out += 1
            return None
        left_out, self._left_out = self._left_out, 0
        return left_out

    def refused(self, now: float, *, uid: int, what: str, why: str, **more: object) -> None:
        """Log one refusal, or count it."""
        if (left_out := self.room(now, uid)) is not None:
            self._log.warning("socket_refused", what=what, uid=uid, why=why, left_out=left_out, **more)
