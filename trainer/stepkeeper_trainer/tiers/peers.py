"""Each node's files of the local tier are kept by the next node too, so that one lost node loses none of them.

The first rank of each node listens on a TCP port (`Keeping`); a key that only this launch knows was handed round
by the ranks' own process group.  Who connects proves to know it (HMAC over a challenge and what is asked for); each
chunk is compared with the receiver's own manifest before a file gets its name.  Bytes are not encrypted, as those of
the training itself are not.

Anybody on the network can reach the port.  Who proves nothing within a second is left, and holds up nobody meanwhile:
connections are served side by side, and of too many the oldest gives way.
"""

from __future__ import annotations

import errno
import fcntl
import hmac
import secrets
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import BinaryIO

import msgspec

from stepkeeper_trainer.formats.manifest import FileEntry
from stepkeeper_trainer.formats.plain import DecodeError, decode
from stepkeeper_trainer.log import say, warn
from stepkeeper_trainer.tiers.copying import Pace
from stepkeeper_trainer.tiers.directory import LocalTier
from stepkeeper_trainer.tiers.tier import Held, TierError, check_chunk, writer_of

WITHIN_S = 60.0  # of one read or write, and until the receiver has the step's manifest itself
HEADER_BYTES_MAX = 4096
GO, HAVE, DONE = b"G", b"H", b"D"  # one byte each: send it; it is there already; it is kept
CHALLENGE_BYTES = 32
PROOF_BYTES = 32
PROVED_WITHIN_S = 1.0  # who knows the key answers at once
CONNECTED_WITHIN_S = 3.0  # tried anew until then: a proof may be late once
PAUSE_S = 0.05
_SIOCGIFADDR = 0x8915


class Wanted(msgspec.Struct, frozen=True):
    """What a connection asks for: to send this file."""

    save_id: str
    step: int
    file: str


@dataclass(frozen=True, slots=True)
class Address:
    """Where the first rank of a node listens, and the key it takes."""

    host: str
    port: int
    key: bytes


class PeerCopies:
    """Sends this node's files to the next one, on a thread."""

    def __init__(self, local: LocalTier, next_node: Address, ranks: tuple[int, ...], pace: Pace) -> None:
        """Start the thread; `ranks` are those of this node: their files go."""
        self._to = next_node.host
        self._sender = Sender(local, next_node, ranks, pace)
        self._changed = threading.Condition()
        self._newest: Held | None = None
        self._sending = self._stopping = False
        self._thread = threading.Thread(target=self._work, name="stepkeeper-peer-copies", daemon=True)
        self._thread.start()

    @property
    def busy(self) -> bool:
        """Whether a step waits, or is on its way."""
        with self._changed:
            return self._newest is not None or self._sending

    def offer(self, held: Held) -> None:
        """Have a step's files sent; one that still waits is left out for it."""
        with self._changed:
            self._newest = held
            self._changed.notify_all()

    def close(self) -> None:
        """Stop between two files."""
        self._sender.stop()
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
                self._sending = True
            assert held is not None
            try:
                size = self._sender.send(held)
            except (OSError, TierError) as error:
                warn("peer_copy_failed", step=held.manifest.step, to=self._to, why=error)
            else:
                say("peer_copied", step=held.manifest.step, to=self._to, bytes=size)
            with self._changed:
                self._sending = False


class Sender:
    """Sends files of some ranks to another node."""

    def __init__(self, local: LocalTier, to: Address, ranks: tuple[int, ...], pace: Pace) -> None:
        """Do nothing yet."""
        self._local, self._to, self._ranks, self._pace = local, to, ranks, pace
        self._stopping = False

    def stop(self) -> None:
        """Stop between two files."""
        self._stopping = True

    def send(self, held: Held) -> int:
        """Send the files of a step that are here and not there; return how many bytes went.

        Raises:
            OSError, TierError: the other node does not take them, or a file is damaged.
        """
        own = {
            name: entry
            for name, entry in held.manifest.files.items()
            if writer_of(name) in self._ranks and self._local.tier.has_file(held, name, entry)
        }
        if not own:
            return 0
        sent = 0
        first = next(iter(own))
        with self._connect(held, first) as connection:  # when all is known: it wants a proof at once
            for name, entry in own.items():
                if self._stopping:
                    raise TierError("the process leaves")
                if name != first:
                    self._ask(connection, held, name)
                sent += self._send_file(connection, held, name, entry)
        return sent

    def _connect(self, held: Held, name: str) -> socket.socket:
        """Connect, and ask for the first file: again where a busy node was late with its proof, or in a crowd.

        Raises:
            OSError, TierError: the other node does not take it.
        """
        began = time.monotonic()
        while True:
            connection = socket.create_connection((self._to.host, self._to.port), timeout=WITHIN_S)
            try:
                self._ask(connection, held, name)
                _require_answer(connection)
            except (OSError, TierError):
                connection.close()
                if self._stopping or time.monotonic() - began > CONNECTED_WITHIN_S:
                    raise
                time.sleep(PAUSE_S)
            except BaseException:
                connection.close()
                raise
            else:
                return connection

    def _ask(self, connection: socket.socket, held: Held, name: str) -> None:
        """Say which file is to come, and prove to know the key."""
        line = msgspec.json.encode(Wanted(held.manifest.save_id, held.manifest.step, name)) + b"\n"
        challenge = _exactly(connection, CHALLENGE_BYTES)
        connection.sendall(line + proof_of(self._to.key, challenge, line))

    def _send_file(self, connection: socket.socket, held: Held, name: str, entry: FileEntry) -> int:
        """Send a file that was asked for, unless it is there."""
        if _exactly(connection, 1) == HAVE:
            return 0
        where = f"{self._local.checkpoints}/{held.directory}/{name}"
        for index, chunk in enumerate(self._local.tier.chunks(held, name, entry, 0)):
            check_chunk(chunk, entry, index, where=where)
            self._pace.take(len(chunk))
            connection.sendall(chunk)
        if _exactly(connection, 1) != DONE:
            raise TierError(f"{name}: the other node did not keep it")
        return entry.bytes


def own_host(towards: str) -> str:
    """Return the address by which the host that ranks meet at sees this one.  Raises OSError."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((towards, 9))  # sends nothing: it chooses the way
        return str(probe.getsockname()[0])


def interface_host(name: str) -> str:
    """Return the IPv4 address of a network interface.  Raises TierError: which ones there are."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
        except OSError as error:
            there = ", ".join(sorted(each for _, each in socket.if_nameindex()))
            raise TierError(
                f"peer_interface {name}: {socket.gethostname()} has no such network interface with an IPv4 address "
                f"({error.strerror}); it has {there}"
            ) from error
    return socket.inet_ntoa(answer[20:24])


def next_node(leaders: list[int], own: int) -> int | None:
    """Return the first rank of the next node; None where there is one node only.

    >>> next_node([0, 8, 16], 8), next_node([0, 8, 16], 16), next_node([0], 0)
    (16, 0, None)
    """
    return leaders[(leaders.index(own) + 1) % len(leaders)] if len(leaders) > 1 else None


def proof_of(key: bytes, challenge: bytes, line: bytes) -> bytes:
    """Return what only who knows the key can tell of a challenge."""
    return hmac.digest(key, challenge + line, "sha256")


def _require_answer(connection: socket.socket) -> None:
    if not connection.recv(1, socket.MSG_PEEK):
        raise TierError("the other node has closed the connection")


def _exactly(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        more = connection.recv(count - len(data))
        if not more:
            raise TierError("the other node has closed the connection")
        data += more
    return data


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
                self._refusals.report(error)
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
    """Reports connections that were refused, rarely: any process that reaches the port can make thousands."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._next_at = 0.0
        self._untold = 0

    def report(self, why: Exception) -> None:
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
