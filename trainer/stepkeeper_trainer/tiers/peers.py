"""Each node's files of the local tier are kept by the next node too, so that one lost node loses none of them.

The first rank of each node listens on a TCP port; a key that only this launch knows was handed round by the ranks'
own process group.  Who connects proves to know it (HMAC over a challenge and what is asked for); each chunk is
compared with the receiver's own manifest before a file gets its name.  Bytes are not encrypted, as those of the
training itself are not.
"""

from __future__ import annotations

import errno
import hmac
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import BinaryIO

import msgspec

from stepkeeper_trainer.formats.decoding import DecodeError, decode
from stepkeeper_trainer.formats.manifest import FileEntry
from stepkeeper_trainer.log import say, warn
from stepkeeper_trainer.tiers.local import LocalTier
from stepkeeper_trainer.tiers.pace import Pace
from stepkeeper_trainer.tiers.tier import Held, TierError, check_chunk, writer_of

KEY_BYTES = 32
WITHIN_S = 60.0  # of one read or write, and until the receiver has the step's manifest itself
HEADER_BYTES_MAX = 4096
GO, HAVE, DONE = b"G", b"H", b"D"  # one byte each: send it; it is there already; it is kept
CHALLENGE_BYTES = 32
_PAUSE_S = 0.05
# of `accept`: the next try may do, and a node that listens no more loses a copy at each save
_PASSING = {errno.ECONNABORTED, errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EPROTO, errno.EINTR}


class _Wanted(msgspec.Struct, frozen=True):
    save_id: str
    step: int
    file: str


_wanted = msgspec.json.Decoder(_Wanted)


@dataclass(frozen=True, slots=True)
class Address:
    """Where the first rank of a node listens, and the key it takes."""

    host: str
    port: int
    key: bytes


class Keeping:
    """Keeps the files of the node before this one."""

    def __init__(self, local: LocalTier, host: str) -> None:
        """Listen on `host`.  Raises OSError."""
        self._local = local
        self._key = secrets.token_bytes(KEY_BYTES)
        self._closed = threading.Event()
        self._waits = False  # that it cannot take a connection now was said
        self._socket = socket.create_server((host, 0), backlog=8)
        self.address = Address(host, self._socket.getsockname()[1], self._key)
        self._thread = threading.Thread(target=self._listen, name="stepkeeper-peers", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Listen no more."""
        self._closed.set()
        with suppress(OSError):  # nobody is connected to it
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _listen(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError as error:
                if self._closed.is_set():
                    return
                if error.errno not in _PASSING:
                    warn("peer_copies_off", why=error)
                    return
                if not self._waits:
                    warn("peer_copies_wait", why=error)
                self._waits = True
                self._closed.wait(_PAUSE_S)
                continue
            self._waits = False
            with connection:
                connection.settimeout(WITHIN_S)
                try:
                    self._serve(connection)
                except (OSError, TierError, DecodeError, ValueError) as error:
                    warn("peer_copy_refused", why=error)

    def _serve(self, connection: socket.socket) -> None:
        """Take in files, one after the other, until the sender closes."""
        stream = connection.makefile("rb")
        while True:
            challenge = secrets.token_bytes(CHALLENGE_BYTES)
            connection.sendall(challenge)
            line = stream.readline(HEADER_BYTES_MAX)
            if not line:
                return
            proof = stream.read(32)
            if not hmac.compare_digest(proof, _proof(self._key, challenge, line)):
                raise TierError("it does not know this launch's key")
            wanted = decode(_wanted, line)
            held = self._held(wanted)
            entry = held.manifest.files.get(wanted.file)
            if entry is None:
                raise TierError(f"{wanted.file}: not a file of step {wanted.step}")
            if wanted.file in self._local.files(held):
                connection.sendall(HAVE)
                continue
            connection.sendall(GO)
            where = f"step {wanted.step}, {wanted.file}, from the node before"
            self._local.receive(held, wanted.file, entry, _received(stream, entry, where))
            connection.sendall(DONE)

    def _held(self, wanted: _Wanted) -> Held:
        """Return our own manifest of the step, as soon as this node has it."""
        limit_at = time.monotonic() + WITHIN_S
        while True:
            for held in self._local.steps():
                if held.manifest.save_id == wanted.save_id:
                    return held
            if time.monotonic() > limit_at:
                raise TierError(f"step {wanted.step}: this node has nothing of it")
            time.sleep(_PAUSE_S)


class PeerCopies:
    """Sends this node's files to the next one, on a thread."""

    def __init__(self, local: LocalTier, next_node: Address, ranks: tuple[int, ...], pace: Pace) -> None:
        """Start the thread; `ranks` are those of this node: their files go."""
        self._local, self._next, self._ranks, self._pace = local, next_node, ranks, pace
        self._changed = threading.Condition()
        self._newest: Held | None = None
        self._stopping = False
        self._thread = threading.Thread(target=self._work, name="stepkeeper-peer-copies", daemon=True)
        self._thread.start()

    def offer(self, held: Held) -> None:
        """Have a step's files sent; one that still waits is left out for it."""
        with self._changed:
            self._newest = held
            self._changed.notify_all()

    def close(self) -> None:
        """Stop between two files."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._newest is not None or self._stopping)
                if self._stopping:
                    return
                held, self._newest = self._newest, None
            assert held is not None
            try:
                size = self._send(held)
            except (OSError, TierError) as error:
                warn("peer_copy_failed", step=held.manifest.step, to=self._next.host, why=error)
            else:
                say("peer_copied", step=held.manifest.step, to=self._next.host, bytes=size)

    def _send(self, held: Held) -> int:
        sent = 0
        with socket.create_connection((self._next.host, self._next.port), timeout=WITHIN_S) as connection:
            for name, entry in held.manifest.files.items():
                if self._stopping:
                    raise TierError("the process leaves")
                if writer_of(name) in self._ranks and self._local.tier.has_file(held, name, entry):
                    sent += self._send_file(connection, held, name, entry)
        return sent

    def _send_file(self, connection: socket.socket, held: Held, name: str, entry: FileEntry) -> int:
        manifest = held.manifest
        line = msgspec.json.encode(_Wanted(manifest.save_id, manifest.step, name)) + b"\n"
        challenge = _exactly(connection, CHALLENGE_BYTES)
        connection.sendall(line + _proof(self._next.key, challenge, line))
        if _exactly(connection, 1) == HAVE:
            return 0
        where = f"{self._local.checkpoints}/{held.directory}/{name}"
        for index, chunk in enumerate(self._local.tier.chunks(held, name, entry, 0)):
            check_chunk(chunk, entry, index, where=where)
            self._pace.take(len(chunk))
            connection.sendall(chunk)
        if _exactly(connection, 1) != DONE:
            raise TierError(f"{name}: the next node did not keep it")
        return entry.bytes


def own_host(towards: str) -> str:
    """Return the address by which the host that ranks meet at sees this one.  Raises OSError."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((towards, 9))  # sends nothing: it chooses the way
        return str(probe.getsockname()[0])


def next_node(leaders: list[int], own: int) -> int | None:
    """Return the first rank of the next node; None where there is one node only.

    >>> next_node([0, 8, 16], 8), next_node([0, 8, 16], 16), next_node([0], 0)
    (16, 0, None)
    """
    return leaders[(leaders.index(own) + 1) % len(leaders)] if len(leaders) > 1 else None


def _proof(key: bytes, challenge: bytes, line: bytes) -> bytes:
    return hmac.digest(key, challenge + line, "sha256")


def _exactly(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        more = connection.recv(count - len(data))
        if not more:
            raise TierError("the next node has closed the connection")
        data += more
    return data


def _received(stream: BinaryIO, entry: FileEntry, where: str) -> Iterator[bytes]:
    """Yield chunks as they come, each compared with the manifest.  Raises TierError."""
    for index in range(len(entry.chunks)):
        left = min(entry.chunk_bytes, entry.bytes - index * entry.chunk_bytes)
        chunk = stream.read(left)
        if len(chunk) != left:
            raise TierError(f"{where}: ends in chunk {index}")
        check_chunk(chunk, entry, index, where=where)
        yield chunk
