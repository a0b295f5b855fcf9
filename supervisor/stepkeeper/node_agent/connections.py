"""The peers of the agent's socket: who they are, and how much of the agent each may have.  Nothing here waits."""

from __future__ import annotations

import errno
import os
import re
import select
import socket
from collections import OrderedDict
from collections.abc import Collection
from typing import NamedTuple

import msgspec

from stepkeeper.log import Log
from stepkeeper.loop_tools import RateLimiter
from stepkeeper.node_agent.protocol import MESSAGE_BYTES_MAX, Credentials

ROOT = 0

# How much of anything one user, or all of them, may have of the agent.


class Rate(NamedTuple):
    """So many a second, and so many at once."""

    per_s: float
    burst: float


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """One field a limit."""

    connections_max: int = 256
    connections_per_uid_max: int = 32
    backlog: int = 4096
    accepts: Rate = Rate(10_000.0, 1000.0)  # of all: a caller behind one that connects without end is served soon
    accepts_per_uid: Rate = Rate(20.0, 64.0)
    packets: Rate = Rate(5.0, 20.0)  # of one connection
    packets_per_uid: Rate = Rate(50.0, 200.0)
    unjoined_s: float = 10.0  # a connection that has not joined is closed then
    send_buffer_bytes: int = 64 * 1024  # what a peer has not read, in the kernel: about a hundred messages
    uids_max: int = 4096  # users remembered in each table below; a user with subordinate uids has 65,536
    looks: Rate = Rate(1.0, 10.0)
    looks_per_uid: Rate = Rate(0.1, 3.0)
    questions: Rate = Rate(5.0, 20.0)  # to Slurm
    questions_per_uid: Rate = Rate(0.5, 8.0)  # a node with eight GPUs may have eight jobs of one user
    questions_max: int = 32  # waiting
    questions_per_uid_max: int = 4
    expedites_per_uid: Rate = Rate(0.1, 10.0)  # each costs Slurm calls
    log_lines: Rate = Rate(1.0, 20.0)
    log_lines_per_uid: Rate = Rate(0.2, 5.0)


class RateLimiters:
    """One a user.  The user seen longest ago is forgotten first, so memory stays bounded."""

    def __init__(self, rate: Rate, uids_max: int) -> None:
        self._rate = rate
        self._uids_max = uids_max
        self._of: OrderedDict[int, RateLimiter] = OrderedDict()

    def take(self, uid: int, now: float) -> bool:
        """Take one token of a user's, if there is one."""
        limiter = self._of.get(uid)
        if limiter is None:
            if len(self._of) >= self._uids_max:
                self._of.popitem(last=False)
            limiter = self._of[uid] = RateLimiter(*self._rate)
        self._of.move_to_end(uid)
        return limiter.take(now)


class BoundedLog:
    """Logs what users cause, at a bounded rate; the lines left out are counted in the next one."""

    def __init__(self, log: Log, limits: Limits) -> None:
        self._log = log
        self._all = RateLimiter(*limits.log_lines)
        self._each = RateLimiters(limits.log_lines_per_uid, limits.uids_max)
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


class EndedError(Exception):
    """The connection is over.  `blame`: its peer broke a rule, and the log says so."""

    def __init__(self, why: str, *, blame: bool = True) -> None:
        super().__init__(why)
        self.blame = blame


class Connection:
    """A peer, by its number on this server; numbers are never used again."""

    def __init__(self, number: int, sock: socket.socket, peer: Credentials, limits: Limits, now: float) -> None:
        self.number = number
        self.socket = sock
        self.peer = peer
        self.opened_at = now
        self.job_id: int | None = None  # joined
        self.restart_count = 0  # of that job's attempt
        self.asking = False  # Slurm is asked about its `Join`
        self.rate = RateLimiter(*limits.packets)
        self._limits = limits

    def receive(self) -> bytes | None:
        """Return one packet, or None.

        No room is given for ancillary data: descriptors that a peer sends along are closed by the kernel.

        Raises:
            EndedError: the peer left, or sent what it must not.
        """
        try:
            packet, _, flags, _ = self.socket.recvmsg(MESSAGE_BYTES_MAX, 0)
        except BlockingIOError:
            return None
        except OSError as error:
            raise EndedError(error.strerror or "the connection broke", blame=False) from error
        if flags & socket.MSG_TRUNC:
            raise EndedError(f"a message of more than {MESSAGE_BYTES_MAX} bytes")
        if flags & socket.MSG_CTRUNC:
            raise EndedError("a message with descriptors or credentials")
        if not packet:
            raise EndedError("the peer left", blame=False)  # an empty packet looks the same
        return packet

    def send(self, packet: bytes) -> None:
        """Send.  A peer that was cut off because it did not read gets the open incidents when it joins again.

        Raises:
            EndedError: the peer left, or does not read.
        """
        try:
            self.socket.send(packet, socket.MSG_NOSIGNAL)
        except BlockingIOError as error:
            raise EndedError("it does not read what it is sent") from error
        except OSError as error:
            raise EndedError(error.strerror or "the connection broke", blame=False) from error

    def overdue(self, now: float) -> bool:
        """Whether the connection must end now, because its peer has not joined."""
        return self.job_id is None and not self.asking and now - self.opened_at > self._limits.unjoined_s


# Who may come in, and how often a peer may write.  Pure but for its memory of what was.


class Door:
    """Counts connections and messages.  Root is trusted, and always comes in."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self.accepts = RateLimiter(*limits.accepts)
        self._accepts_of = RateLimiters(limits.accepts_per_uid, limits.uids_max)
        self._packets_of = RateLimiters(limits.packets_per_uid, limits.uids_max)

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


# Who a peer is, by the kernel's word: uid, process, and the job that Slurm put the process in.
#
# A user chooses neither the credentials of a socket nor the control group that slurmstepd put its processes in.

_SO_PEERPIDFD = 77  # Linux 6.5; not in Python's socket module
_PROC_BYTES_MAX = 16 * 1024
# in these hierarchies only root makes groups; `name=systemd` and parts of the unified one are handed to users
_V1_CONTROLLERS = frozenset(("freezer", "memory", "devices", "cpuset"))
_V1 = re.compile(r"/slurm(?:_(?P<node>[^/]+))?/uid_(?P<uid>\d+)/job_(?P<job>\d+)/step_[^/]+(?:/.*)?")
_V2 = re.compile(r"/system\.slice/(?:(?P<node>[^/]+)_)?slurmstepd\.scope/job_(?P<job>\d+)/step_[^/]+(?:/.*)?")


class Membership(msgspec.Struct, frozen=True, kw_only=True):
    """The job whose step a process is in."""

    job_id: int
    uid: int | None  # of the job; None where the path does not say
    node: str  # empty: the only one of this machine


def job_of(sock: socket.socket, peer: Credentials) -> Membership | None:
    """Return the job that the peer's process is in; None where the kernel does not say for sure.

    The number of a process may be given to another one as soon as it ended: what was read counts only if the process
    lives after the reading.
    """
    if peer.pid <= 0:
        return None
    pidfd = _pidfd(sock, peer.pid)
    if pidfd is None:
        return None
    try:
        groups = _read(f"/proc/{peer.pid}/cgroup")
        status = _read(f"/proc/{peer.pid}/status")
        if groups is None or status is None or _ended(pidfd):
            return None
    finally:
        os.close(pidfd)
    if parse_uids(status) != {peer.uid}:
        return None  # a set-user-ID program inside another user's job is not that job's word
    found = parse_cgroup(groups)
    if found is None or found.uid not in (None, peer.uid):
        return None
    return found


def parse_cgroup(text: str) -> Membership | None:
    r"""Read /proc/PID/cgroup; None outside of every job, or where two lines name two jobs.

    >>> parse_cgroup("5:freezer:/slurm_n1/uid_1000/job_7/step_0/task_0\n").job_id
    7
    >>> parse_cgroup("0::/system.slice/n1_slurmstepd.scope/job_7/step_batch/user/task_0\n").node
    'n1'
    >>> parse_cgroup("0::/user.slice/user-1000.slice/user@1000.service/system.slice/slurmstepd.scope/job_7/step_0\n")
    """
    found: set[tuple[int, str]] = set()
    owners: set[int] = set()
    for line in text.splitlines():
        _, _, rest = line.partition(":")
        names, _, path = rest.partition(":")
        pattern = _V2 if not names else _V1 if _V1_CONTROLLERS & set(names.split(",")) else None
        match = pattern.fullmatch(path) if pattern else None
        if match is None:
            continue
        parts = match.groupdict()
        found.add((int(parts["job"]), parts["node"] or ""))
        if "uid" in parts:
            owners.add(int(parts["uid"]))
    if len(found) != 1 or len(owners) > 1:
        return None
    ((job_id, node),) = found
    return Membership(job_id=job_id, uid=next(iter(owners), None), node=node)


def parse_uids(status: str) -> set[int]:
    r"""Return the real, effective and saved uid of /proc/PID/status.

    >>> sorted(parse_uids("Name:\tx\nUid:\t5\t0\t0\t0\n"))
    [0, 5]
    """
    match = re.search(r"^Uid:\t(\d+)\t(\d+)\t(\d+)", status, re.MULTILINE)
    return {int(each) for each in match.groups()} if match else set()


def _pidfd(sock: socket.socket, pid: int) -> int | None:
    """Return a descriptor of the process that connected, if it still exists."""
    try:
        packed = sock.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD, 4)
    except OSError as error:
        if error.errno != errno.ENOPROTOOPT:
            return None  # it ended
        # An older kernel.  If the number was given away in between, the uid is still checked: at worst the process
        # belongs to another job of the same user.
        try:
            return os.pidfd_open(pid)
        except OSError:
            return None  # it ended
    return int.from_bytes(packed, "little", signed=True) if len(packed) == 4 else None  # noqa: PLR2004 - an int


def _ended(pidfd: int) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))


def _read(path: str) -> str | None:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None  # the process ended, or is hidden from us
    try:
        data = os.read(descriptor, _PROC_BYTES_MAX)
    except OSError:
        return None  # it ended in between
    finally:
        os.close(descriptor)
    return data.decode(errors="replace") if len(data) < _PROC_BYTES_MAX else None
