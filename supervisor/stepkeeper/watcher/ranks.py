"""The watcher's side of its ranks: one Unix datagram socket, and who may talk there."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import statistics
import struct
import time
from collections import deque
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import msgspec

from stepkeeper.watcher import messages as bus
from stepkeeper_trainer.formats.messages import (
    MESSAGE_BYTES_MAX,
    FromRank,
    Hello,
    Progress,
    SaveRequest,
    decode_from_rank,
    encode,
)

PORT_MIN, PORT_TRIES = 20_000, 100
_EPHEMERAL = "/proc/sys/net/ipv4/ip_local_port_range"
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid: struct ucred
BIND_WITHIN_S = 15.0


class RankSocket:
    """Receives the datagrams of this node's ranks and answers them.  It accepts only the owner and root."""

    def __init__(self, name: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        self._socket.setblocking(False)  # noqa: FBT003 - the method takes no keyword
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._bind("\0" + name[1:])
        self._addresses: dict[tuple[str, int], str | bytes] = {}  # (launch, rank) -> the rank's own socket

    def _bind(self, address: str) -> None:
        """Take the name; a watcher of the bus before may need a moment to leave it.  Raises OSError."""
        give_up_at = time.monotonic() + BIND_WITHIN_S
        while True:
            try:
                self._socket.bind(address)
            except OSError as error:
                if error.errno != errno.EADDRINUSE or time.monotonic() > give_up_at:
                    raise
                time.sleep(0.05)
            else:
                return

    def fileno(self) -> int:
        """For select."""
        return self._socket.fileno()

    def receive(self) -> tuple[FromRank, int] | None:
        """Return one message and its sender's pid; None when there is none, or it is not for us."""
        try:
            data, ancillary, _, address = self._socket.recvmsg(
                MESSAGE_BYTES_MAX + 1, socket.CMSG_SPACE(_CREDENTIALS.size)
            )
        except BlockingIOError:
            return None
        pid, uid = _sender(ancillary)
        if uid not in (os.getuid(), 0) or len(data) > MESSAGE_BYTES_MAX:
            return None
        try:
            message = decode_from_rank(data)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            return None  # somebody else's datagram: our own library sends JSON
        if message is None:
            return None
        if isinstance(message, Hello) and address:
            self._addresses[(message.launch, message.rank)] = address
        return message, pid

    def send(self, launch: str, request: SaveRequest) -> list[int]:
        """Send to every rank of a launch that said hello; return the ranks that could not be reached."""
        unreached = []
        for (of_launch, rank), address in self._addresses.items():
            if of_launch != launch:
                continue
            try:
                self._socket.sendto(encode(request), address)
            except OSError:
                unreached.append(rank)  # gone, or its queue is full: the caller sends again
        return unreached

    def forget(self) -> None:
        """Drop all addresses: their launch is over."""
        self._addresses.clear()

    def close(self) -> None:
        """Give the name back."""
        self._socket.close()


def _sender(ancillary: list[tuple[int, int, bytes]]) -> tuple[int, int]:
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_CREDENTIALS:
            pid, uid, _ = _CREDENTIALS.unpack(data[: _CREDENTIALS.size])
            return pid, uid
    return 0, -1


def free_port() -> int:
    """Return a TCP port that is free on this node right now, for a rank that begins to listen there seconds later.

    It is below those that the kernel gives to outgoing connections: else one of them may take it meanwhile.
    """
    with open(_EPHEMERAL) as file:
        below = int(file.read().split()[0]) - PORT_MIN
    for _ in range(PORT_TRIES if below > 0 else 0):
        with contextlib.suppress(OSError), socket.socket() as sock:  # taken: another
            sock.bind(("", PORT_MIN + int.from_bytes(os.urandom(4), "big") % below))
            return int(sock.getsockname()[1])
    with contextlib.closing(socket.socket()) as sock:
        sock.bind(("", 0))
        return int(sock.getsockname()[1])


# What a node's ranks work themselves for a step: their words, reduced to one every few seconds, of the slowest.

EVERY_S = 15.0
WORDS_MAX = 256  # of a rank, between two of ours


def ranks_here(started: Mapping[int, int], greeted: Mapping[int, int]) -> dict[int, int]:
    """Return the processes of a launch's ranks on this node, by rank.

    A task that a wrapper started is the rank of its number, unless other ranks greet: then it is a launcher (torchrun).
    Its number is Slurm's, and the rank of that number may be on another node.

    Args:
        started: pids of tasks, by Slurm's numbers.
        greeted: pids of ranks whose trainer library has said hello.

    >>> ranks_here({2: 70, 3: 80}, {2: 71})
    {2: 71, 3: 80}
    >>> ranks_here({1: 70}, {2: 71, 3: 72}), ranks_here({1: 70}, {0: 71}), ranks_here({1: 70}, {})
    ({2: 71, 3: 72}, {0: 71}, {1: 70})
    """
    return dict(greeted) if greeted.keys() - started.keys() else {**started, **greeted}


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
