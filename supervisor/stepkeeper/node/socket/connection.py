"""One connection: what its peer sent, and what it has not read yet.  Nothing here waits."""

from __future__ import annotations

import socket
from collections import deque

from stepkeeper.node.protocol import MESSAGE_BYTES_MAX
from stepkeeper.node.socket.limits import Bucket, Limits
from stepkeeper.node.socket.peers import Credentials


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
        self.asking = False  # Slurm is asked about its `Join`
        self.looks: dict[int, float] = {}  # number of the look -> answered until
        self.rate = Bucket(limits.packets_per_s, limits.packets_burst, now)
        self._limits = limits
        self._outgoing: deque[bytes] = deque()
        self._stuck_at: float | None = None

    @property
    def stuck(self) -> bool:
        """Whether something waits for the peer to read."""
        return bool(self._outgoing)

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

    def send(self, packet: bytes, now: float) -> None:
        """Send, or keep it until the peer has read what came before.

        Raises:
            EndedError: the peer left, or does not read.
        """
        if len(self._outgoing) >= self._limits.outgoing_max:
            raise EndedError(f"it has not read {self._limits.outgoing_max} messages")
        self._outgoing.append(packet)
        self.flush(now)

    def flush(self, now: float) -> None:
        """Send what waits, as far as the peer has room.

        Raises:
            EndedError: see `send`.
        """
        while self._outgoing:
            try:
                self.socket.send(self._outgoing[0], socket.MSG_NOSIGNAL)
            except BlockingIOError:
                self._stuck_at = now if self._stuck_at is None else self._stuck_at
                return
            except OSError as error:
                raise EndedError(error.strerror or "the connection broke", blame=False) from error
            self._outgoing.popleft()
            self._stuck_at = None

    def overdue(self, now: float) -> str | None:
        """Return why the connection must end now, if it must."""
        if self.job_id is None and not self.asking and now - self.opened_at > self._limits.unjoined_s:
            return f"it did not join in {self._limits.unjoined_s:g} s"
        if self._stuck_at is not None and now - self._stuck_at > self._limits.outgoing_stuck_s:
            return f"it has read nothing for {self._limits.outgoing_stuck_s:g} s"
        return None

    def watchful(self) -> bool:
        """Whether time alone can change something about it."""
        return self.job_id is None or bool(self._outgoing) or bool(self.looks)
