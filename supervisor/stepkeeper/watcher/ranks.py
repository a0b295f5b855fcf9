"""The watcher's side of its ranks: one Unix datagram socket, and who may talk there."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import struct
import time

import msgspec

from stepkeeper_trainer.formats.messages import (
    MESSAGE_BYTES_MAX,
    FromRank,
    Hello,
    SaveRequest,
    decode_from_rank,
    encode,
)

PORT_MIN, PORT_TRIES = 20_000, 100
_EPHEMERAL = "/proc/sys/net/ipv4/ip_local_port_range"
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid: struct ucred
BIND_WITHIN_S = 15.0


class RankSocket:
    """Receives the datagrams of this node's ranks and answers them.  Only the owner and root are heard."""

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

    It is below those that the kernel gives to whoever asks for any: else an outgoing connection may take it meanwhile.
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
