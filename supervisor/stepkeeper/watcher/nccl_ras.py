"""Which rank has not come to a collective, by NCCL's own RAS: a further witness beside stacks and flight recorders.

It needs neither the trainer library nor torch's flight recorder.  What is known of it, from NVIDIA's nccl repository
(v2.28.7 and 2.30, `src/ras/client.cc`, `src/ras/client_support.cc`, `docs/userguide/source/troubleshooting/ras.rst` and
`env.rst`):

* Since 2.24 each process of a job has a RAS thread.  All of a node listen for clients on one address, `NCCL_RAS_ADDR`,
  by default `localhost:28028`.  They share it (`SO_REUSEPORT`): any of them may answer, and one that is stopped does
  not.  `NCCL_RAS_ENABLE=0` turns it off.
* The protocol is lines of text: `CLIENT PROTOCOL 2` is answered by `SERVER PROTOCOL n`, `TIMEOUT seconds` (of each leg
  of the collection) and `SET FORMAT json` by `OK`, or by `ERROR: ...`.  `STATUS` is answered by the document, and the
  end of the connection.  `SET FORMAT` is there since 2.28.7; older ones say `ERROR: Unknown command`.
* The document: `communicators`, each with `hash`, `secondary_hash`, `size`, `ranks` and `missing_ranks`.  Each rank has
  `rank` (in the communicator), `host` (an address), `pid` and `collective_counts`: how many it has issued, by
  operation.  Sends and receives are not counted.  `missing_ranks` are those whose process did not answer.
* Counts that differ mean nothing by themselves: ranks come at different times, and each is asked at another moment.

So they count only where two looks, seconds apart, found the very same counts, and exactly one process of the whole job
is behind in every communicator that shows a difference, with all others level.  Where a rank is missing, nothing is
said.  One watcher asks for all, that of rank 0.  Which process is which rank, the communicator of all ranks tells: its
ranks are the job's.  A job without one gets no evidence from here.

A rank that waits for its GPU, as in `loss.item()`, has issued less than those that have queued more, and is not to
blame.  So these counts confirm what is known of a rank, and never stand alone (`stack_collector.trust`).
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec

from stepkeeper_trainer.formats.collectives import NUMBER_MAX, RANKS_MAX, Place, compress, trim
from stepkeeper_trainer.formats.plain import DecodeError, decode

DEFAULT = "localhost:28028"
ADDRESS_VARIABLE, ENABLE_VARIABLE = "NCCL_RAS_ADDR", "NCCL_RAS_ENABLE"
WITHIN_S = 5.0  # for a look
GREETED_WITHIN_S = 0.5  # else another process of the node is tried
TRIES = 3
LINE_BYTES_MAX = 1024
DOCUMENT_BYTES_MAX = 64 * 1024 * 1024  # 8,192 ranks have 5 MB a communicator
COMMUNICATORS_MAX = 6  # that are reported, as of a flight recorder
WHAT = "NCCL"
_LISTENS = "0A"  # the state of a socket in /proc/net/tcp
_ANY = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104  # what a listener on all addresses is reached by

Rank = Annotated[int, msgspec.Meta(ge=0, lt=RANKS_MAX)]
Count = Annotated[int, msgspec.Meta(ge=0, le=NUMBER_MAX)]
Address = tuple[str, int]
Process = tuple[str, int]  # host and pid


class Member(msgspec.Struct, frozen=True):
    """A rank of a communicator, as RAS tells it."""

    rank: Rank
    host: str
    pid: int
    collective_counts: dict[str, Count]


class Communicator(msgspec.Struct, frozen=True):
    """A communicator, as RAS tells it."""

    hash: str
    size: int
    ranks: tuple[Member, ...]
    secondary_hash: str = ""
    missing_ranks: tuple[dict[str, object], ...] = ()


class Status(msgspec.Struct, frozen=True):
    """RAS's answer, as far as it is read."""

    communicators: tuple[Communicator, ...]


class Behind(NamedTuple):
    """Where ranks are in one communicator: the same place for all of them."""

    ranks: str  # as of `compress`
    first: int
    place: Place


_decoder: msgspec.json.Decoder[Status] = msgspec.json.Decoder(Status)


class RasWitness:
    """Asks twice, each time on a thread of its own: who does not answer costs nothing else any time."""

    def __init__(self, pids: Mapping[int, int], *, within_s: float = WITHIN_S) -> None:
        """Begin the first look, where rank 0 is among `pids`, which are by rank."""
        self._pids, self._within_s = dict(pids), within_s
        self._address = address_of(pids[0]) if 0 in pids else None
        self._looks: list[Status | None] = []
        self._thread: threading.Thread | None = None
        self._until = 0.0
        self._begin()

    def look_again(self) -> None:
        """Begin the second look, if the first has come to something."""
        if self._looks and self._looks[0] is not None:
            self._begin()

    def take(self) -> list[Behind]:
        """Return where the ranks are if one of them is behind; waits for the second look as long as that may take."""
        if self._thread is not None:
            self._thread.join(max(0.0, self._until - time.monotonic()))
        looks = [look for look in list(self._looks) if look is not None]
        return find_behind(looks[0], looks[1], self._pids) if len(looks) > 1 else []

    def _begin(self) -> None:
        if self._address is None:
            return
        self._until = time.monotonic() + self._within_s
        self._thread = threading.Thread(target=self._look, args=(self._address, self._until), name="ras", daemon=True)
        self._thread.start()

    def _look(self, address: Address, until: float) -> None:
        self._looks.append(ask(address, until))


def address_of(pid: int) -> Address | None:
    """Return where RAS of a process listens on this node; None where it does not, or by a name."""
    try:
        words = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return None
    found = dict(word.decode(errors="replace").partition("=")[::2] for word in words)
    if found.get(ENABLE_VARIABLE) == "0":
        return None
    host, _, port = found.get(ADDRESS_VARIABLE, DEFAULT).rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    host = _ANY.get(host, host)
    if not (port.isascii() and port.isdigit() and 0 < int(port) < 1 << 16):
        return None
    return (host, int(port)) if host == "localhost" or is_here(host) else None


def is_here(host: str) -> bool:
    """Tell whether an address, in numbers, is one of this node."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        socket.inet_pton(family, host)
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((host, 0))
    except OSError:
        return False
    return True


def listens(port: int) -> bool:
    """Tell whether processes of our own user listen on a port, and nobody else: what others say is no evidence."""
    owners = set()
    for name in ("tcp", "tcp6"):
        try:
            rows = Path(f"/proc/net/{name}").read_text().splitlines()[1:]
        except OSError:
            continue  # no IPv6
        for row in map(str.split, rows):
            if row[3] == _LISTENS and int(row[1].rpartition(":")[2], 16) == port:
                owners.add(int(row[7]))
    return owners == {os.getuid()}


def ask(address: Address, until: float) -> Status | None:
    """Return the state of the job's communicators; None where nobody tells it in time, or not in this format.

    Args:
        address: of RAS.
        until: of the monotonic clock.
    """
    if not listens(address[1]):
        return None
    for _ in range(TRIES):
        try:
            with socket.create_connection(address, timeout=min(GREETED_WITHIN_S, _left(until))) as connection:
                greeted = _ask(connection, "CLIENT PROTOCOL 2", time.monotonic() + min(GREETED_WITHIN_S, _left(until)))
                if not greeted.startswith("SERVER PROTOCOL "):
                    return None
                for words in (f"TIMEOUT {max(1, int(_left(until)))}", "SET FORMAT json"):
                    if _ask(connection, words, until) != "OK":
                        return None
                connection.sendall(b"STATUS\n")
                return decode(_decoder, _read(connection, until))
        except TimeoutError:
            continue  # one that is stopped: the next connection is another one's, perhaps
        except (OSError, DecodeError):
            return None
    return None


def _left(until: float) -> float:
    """Return the seconds that are left.  Raises TimeoutError."""
    left = until - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


def _ask(connection: socket.socket, words: str, until: float) -> str:
    """Say a line and return the one that answers it.  Raises OSError."""
    connection.settimeout(_left(until))
    connection.sendall(words.encode() + b"\n")
    line = b""
    while not line.endswith(b"\n"):
        connection.settimeout(_left(until))
        part = connection.recv(LINE_BYTES_MAX)
        line += part
        if not part or len(line) > LINE_BYTES_MAX:
            raise ConnectionAbortedError
    return line.decode(errors="replace").strip()


def _read(connection: socket.socket, until: float) -> bytes:
    """Return all until the end of a connection.  Raises OSError."""
    data = bytearray()
    while True:
        connection.settimeout(_left(until))
        part = connection.recv(1 << 16)
        if not part:
            return bytes(data)
        data += part
        if len(data) > DOCUMENT_BYTES_MAX:
            raise ConnectionAbortedError


def find_behind(before: Status, after: Status, pids: Mapping[int, int]) -> list[Behind]:
    """Return where the ranks are in the communicators in which one is behind; nothing where that is not certain.

    Args:
        before: the first look.
        after: the second one, seconds later.
        pids: of the ranks of this node.
    """
    if _counts(before) != _counts(after) or any(each.missing_ranks for each in after.communicators):
        return []
    ranks = _find_ranks(after, pids)
    late: set[Process] = set()
    found = []
    for each in after.communicators:
        level = _level(each)
        if any((member.host, member.pid) not in ranks for member in each.ranks):
            return []
        behind = [member for member in each.ranks if member.collective_counts != level]
        late |= {(member.host, member.pid) for member in behind}
        if behind:
            found.append(each)
    if len(late) != 1:
        return []
    [process] = late
    return [where for each in found[:COMMUNICATORS_MAX] for where in _of_communicator(each, process, ranks)]


def _level(communicator: Communicator) -> dict[str, int]:
    """Return how many of each operation the furthest rank has issued."""
    level: dict[str, int] = {}
    for member in communicator.ranks:
        for name, count in member.collective_counts.items():
            level[name] = max(count, level.get(name, 0))
    return level


def _counts(status: Status) -> dict[tuple[str, str], dict[int, dict[str, int]]]:
    return {
        (each.hash, each.secondary_hash): {member.rank: member.collective_counts for member in each.ranks}
        for each in status.communicators
    }


def _find_ranks(status: Status, pids: Mapping[int, int]) -> dict[Process, int]:
    """Return the rank of each process, by the largest communicator in which this node's ranks are as we know them."""
    fitting = [each for each in status.communicators if _is_of_all(each, pids)]
    largest = max(fitting, key=lambda each: each.size, default=None)
    return {(each.host, each.pid): each.rank for each in largest.ranks} if largest is not None else {}


def _is_of_all(communicator: Communicator, pids: Mapping[int, int]) -> bool:
    processes = {member.rank: (member.host, member.pid) for member in communicator.ranks}
    whole = set(processes) == set(range(communicator.size)) and len(set(processes.values())) == communicator.size
    if not whole or len(communicator.ranks) != communicator.size:
        return False
    ours = [processes.get(rank) for rank in pids]
    if any(known is None or known[1] != pids[rank] for rank, known in zip(pids, ours, strict=True)):
        return False
    return all(is_here(host) for host in {known[0] for known in ours if known is not None})


def _of_communicator(communicator: Communicator, late: Process, ranks: Mapping[Process, int]) -> Iterator[Behind]:
    """Yield the place of the rank that is behind, and that of those that wait for it."""
    [own] = [each for each in communicator.ranks if (each.host, each.pid) == late]
    others = sorted(ranks[each.host, each.pid] for each in communicator.ranks if each is not own)
    done, level = own.collective_counts, _level(communicator)
    names = sorted(name for name, count in level.items() if count > done.get(name, 0))
    group, op = communicator.hash, names[0] if len(names) == 1 else "one of several operations"
    rank, last = ranks[late], _total(done)
    members = compress(str(sorted([rank, *others])))
    place = Place(group=group, what=WHAT, members=members, last=last, last_op=op, issued=True)
    yield Behind(str(rank), rank, trim(place))
    total = _total(level)
    waits = trim(
        Place(group=group, what=WHAT, members=members, last=total, last_op=op, at=last + 1, op=op, issued=True)
    )
    for part in (others, [each for each in others if each < rank], [each for each in others if each > rank]):
        shown = compress(str(part)) if part else ""
        if shown:
            yield Behind(shown, part[0], waits)
            if part is others:
                return


def _total(counts: Mapping[str, int]) -> int:
    return sum(counts.values())
