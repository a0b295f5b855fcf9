"""Each node's files of the local tier are kept by the next node too, so that one lost node loses none of them.

The first rank of each node listens on a TCP port (`peer_keeping`); a key that only this launch knows was handed round
by the ranks' own process group.  Who connects proves to know it (HMAC over a challenge and what is asked for); each
chunk is compared with the receiver's own manifest before a file gets its name.  Bytes are not encrypted, as those of
the training itself are not.
"""

from __future__ import annotations

import hmac
import socket
import threading
import time
from dataclasses import dataclass

import msgspec

from stepkeeper_trainer.formats.manifest import FileEntry
from stepkeeper_trainer.log import say, warn
from stepkeeper_trainer.tiers.copying import Pace
from stepkeeper_trainer.tiers.local import LocalTier
from stepkeeper_trainer.tiers.tier import Held, TierError, check_chunk, writer_of

WITHIN_S = 60.0  # of one read or write, and until the receiver has the step's manifest itself
HEADER_BYTES_MAX = 4096
GO, HAVE, DONE = b"G", b"H", b"D"  # one byte each: send it; it is there already; it is kept
CHALLENGE_BYTES = 32
PROOF_BYTES = 32
PROVED_WITHIN_S = 1.0  # who knows the key answers at once
CONNECTED_WITHIN_S = 3.0  # tried anew until then: a proof may be late once
PAUSE_S = 0.05


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
            OSError, TierError: the next node does not take it.
        """
        began = time.monotonic()
        while True:
            connection = socket.create_connection((self._next.host, self._next.port), timeout=WITHIN_S)
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
        connection.sendall(line + proof_of(self._next.key, challenge, line))

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


def proof_of(key: bytes, challenge: bytes, line: bytes) -> bytes:
    """Return what only who knows the key can tell of a challenge."""
    return hmac.digest(key, challenge + line, "sha256")


def _require_answer(connection: socket.socket) -> None:
    if not connection.recv(1, socket.MSG_PEEK):
        raise TierError("the next node has closed the connection")


def _exactly(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        more = connection.recv(count - len(data))
        if not more:
            raise TierError("the next node has closed the connection")
        data += more
    return data
