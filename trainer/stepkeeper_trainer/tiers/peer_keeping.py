"""Keeping the files of the node before this one: the receiver of `peers`.

Anybody on the network can reach the port.  Who proves nothing within a second is left, and holds up nobody meanwhile:
connections are served side by side, and of too many the oldest gives way.
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
from typing import BinaryIO

import msgspec

from stepkeeper_trainer.formats.decoding import DecodeError, decode
from stepkeeper_trainer.formats.manifest import FileEntry
from stepkeeper_trainer.log import warn
from stepkeeper_trainer.tiers.local import LocalTier
from stepkeeper_trainer.tiers.peers import (
    CHALLENGE_BYTES,
    DONE,
    GO,
    HAVE,
    HEADER_BYTES_MAX,
    PAUSE_S,
    PROOF_BYTES,
    PROVED_WITHIN_S,
    WITHIN_S,
    Address,
    Wanted,
    proof_of,
)
from stepkeeper_trainer.tiers.tier import Held, TierError, check_chunk

KEY_BYTES = 32
STRANGERS_MAX = 32  # served at a time, of those that have proved nothing
REFUSALS_EVERY_S = 60.0
# of `accept`: the next try may do, and a node that listens no more loses a copy at each save
_PASSING = {errno.ECONNABORTED, errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EPROTO, errno.EINTR}

_wanted = msgspec.json.Decoder(Wanted)


class Keeping:
    """Keeps the files of the node before this one."""

    def __init__(self, local: LocalTier, host: str) -> None:
        """Listen on `host`.  Raises OSError."""
        self._local = local
        self._key = secrets.token_bytes(KEY_BYTES)
        self._closed = threading.Event()
        self._waits = False  # that it cannot take a connection now was said
        self._lock = threading.Lock()  # of the three below
        self._strangers: list[socket.socket] = []  # that have not proved anything yet, the oldest first
        self._sender: socket.socket | None = None  # that has
        self._refusals = Refusals()
        self._receiving = threading.Lock()  # held by the thread that takes in files
        self._socket = socket.create_server((host, 0), backlog=STRANGERS_MAX)
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
                self._closed.wait(PAUSE_S)
                continue
            self._waits = False
            self._meet(connection)

    def _meet(self, connection: socket.socket) -> None:
        """Serve a connection on a thread of its own; of many that prove nothing, the oldest gives way."""
        with self._lock:
            if len(self._strangers) >= STRANGERS_MAX:
                _end(self._strangers[0])
                del self._strangers[0]
            self._strangers.append(connection)
        try:
            threading.Thread(target=self._serve, args=(connection,), name="stepkeeper-peer", daemon=True).start()
        except RuntimeError as error:  # no more threads for this user now
            warn("peer_copy_refused", why=error)
            self._forget(connection)
            connection.close()

    def _serve(self, connection: socket.socket) -> None:
        with connection:
            try:
                line = _first_line(connection, self._key, time.monotonic() + PROVED_WITHIN_S)
                self._forget(connection)
                if line:
                    self._take_over(connection, line)
            except (OSError, TierError, DecodeError, ValueError) as error:
                self._refusals.tell(error)
            finally:
                self._forget(connection)

    def _take_over(self, connection: socket.socket, line: bytes) -> None:
        """Take in files from who knows the key; it connects anew only when it has given up what was before."""
        with self._lock:
            before, self._sender = self._sender, connection
            if before is not None:
                _end(before)
        connection.settimeout(WITHIN_S)
        with self._receiving:
            self._receive(connection, line)

    def _forget(self, connection: socket.socket) -> None:
        with self._lock:
            self._strangers = [each for each in self._strangers if each is not connection]
            self._sender = None if self._sender is connection else self._sender

    def _receive(self, connection: socket.socket, line: bytes) -> None:
        """Take in files, one after the other, until the sender closes."""
        stream = connection.makefile("rb")
        while line:
            wanted = decode(_wanted, line)
            held = self._held(wanted)
            entry = held.manifest.files.get(wanted.file)
            if entry is None:
                raise TierError(f"{wanted.file}: not a file of step {wanted.step}")
            if wanted.file in self._local.files(held):
                connection.sendall(HAVE)
            else:
                connection.sendall(GO)
                where = f"step {wanted.step}, {wanted.file}, from the node before"
                self._local.receive(held, wanted.file, entry, _received(stream, entry, where))
                connection.sendall(DONE)
            challenge = secrets.token_bytes(CHALLENGE_BYTES)
            connection.sendall(challenge)
            line = stream.readline(HEADER_BYTES_MAX)
            if line:
                _check(self._key, challenge, line, stream.read(PROOF_BYTES))

    def _held(self, wanted: Wanted) -> Held:
        """Return our own manifest of the step, as soon as this node has it."""
        limit_at = time.monotonic() + WITHIN_S
        while True:
            for held in self._local.steps():
                if held.manifest.save_id == wanted.save_id:
                    return held
            if time.monotonic() > limit_at:
                raise TierError(f"step {wanted.step}: this node has nothing of it")
            time.sleep(PAUSE_S)


class Refusals:
    """Tells of connections that were refused, at most once in a while: whoever reaches the port can make thousands."""

    def __init__(self) -> None:
        """Nothing was told yet."""
        self._lock = threading.Lock()
        self._next_at = 0.0
        self._untold = 0

    def tell(self, why: Exception) -> None:
        """Tell of one, and of how many there were since the one before."""
        with self._lock:
            now = time.monotonic()
            if now < self._next_at:
                self._untold += 1
                return
            others, self._untold, self._next_at = self._untold, 0, now + REFUSALS_EVERY_S
        warn("peer_copy_refused", why=why, others=others)


def _check(key: bytes, challenge: bytes, line: bytes, proof: bytes) -> None:
    if not hmac.compare_digest(proof, proof_of(key, challenge, line)):
        raise TierError("it does not know this launch's key")


def _first_line(connection: socket.socket, key: bytes, limit_at: float) -> bytes:
    """Return what a connection asks for first, with its proof; empty where it closes.

    The limit is of all of it: who sends a byte now and then gains nothing.

    Raises:
        TierError: it proves nothing in time.
        OSError: it broke.
    """
    challenge = secrets.token_bytes(CHALLENGE_BYTES)
    connection.settimeout(PROVED_WITHIN_S)
    connection.sendall(challenge)  # fits any buffer
    data = b""
    while b"\n" not in data[:-PROOF_BYTES]:
        left_s = limit_at - time.monotonic()
        if left_s <= 0 or len(data) >= HEADER_BYTES_MAX + PROOF_BYTES:
            raise TierError(f"it did not prove within {PROVED_WITHIN_S:g} s to know this launch's key")
        connection.settimeout(left_s)
        try:
            more = connection.recv(HEADER_BYTES_MAX)
        except TimeoutError:
            continue
        if not more:
            if data:
                raise TierError("it closed before it proved to know this launch's key")
            return b""
        data += more
    line, proof = data[:-PROOF_BYTES], data[-PROOF_BYTES:]
    _check(key, challenge, line, proof)
    return line


def _end(connection: socket.socket) -> None:
    """Have the thread that serves a connection end."""
    with suppress(OSError):  # it is closed already
        connection.shutdown(socket.SHUT_RDWR)


def _received(stream: BinaryIO, entry: FileEntry, where: str) -> Iterator[bytes]:
    """Yield chunks as they come, each compared with the manifest.  Raises TierError."""
    for index in range(len(entry.chunks)):
        left = min(entry.chunk_bytes, entry.bytes - index * entry.chunk_bytes)
        chunk = stream.read(left)
        if len(chunk) != left:
            raise TierError(f"{where}: ends in chunk {index}")
        check_chunk(chunk, entry, index, where=where)
        yield chunk
