"""A watcher's or supervisor's side of the agent's socket.  Light: watchers import it."""

from __future__ import annotations

import errno
import os
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Mapping
from types import TracebackType
from typing import Self, TypeVar

from stepkeeper.node_agent.protocol import (
    DEFAULT_SOCKET,
    EXCLUDE_MAX,
    MESSAGE_BYTES_MAX,
    SOCKET_VARIABLE,
    Accepted,
    ExpediteRequeue,
    FromAgent,
    Join,
    Joined,
    Look,
    Looked,
    Refused,
    ToAgent,
    decode_from_agent,
    encode,
)

ANSWER_WITHIN_S = 5.0
JOIN_WITHIN_S = 15.0  # the agent may have to ask Slurm
LOOK_WITHIN_S = 65.0
CONNECT_WITHIN_S = 2.0
PACKETS_PER_RECEIVE = 64
KEPT_MAX = 256
_CREDENTIALS = struct.Struct("iII")
_TIMEVAL = struct.Struct("ll")
_Answer = TypeVar("_Answer", Joined, Looked, Accepted)


class AgentError(Exception):
    """The agent cannot be used as wished."""


class AgentAbsentError(AgentError):
    """No agent listens there: a site without it, or it restarts."""


class AgentUntrustedError(AgentError):
    """Somebody else listens there."""


class AgentGoneError(AgentError):
    """The connection is over: connect again later."""


class AgentSilentError(AgentError):
    """No answer in time."""


class AgentRefusedError(AgentError):
    """The agent does not grant it."""

    def __init__(self, refused: Refused) -> None:
        super().__init__(f"the node agent refuses `{refused.what}`: {refused.why}")
        self.what = refused.what
        self.why = refused.why


def socket_path(environment: Mapping[str, str], node: str) -> str:
    """Return where the agent of this node listens."""
    return (environment.get(SOCKET_VARIABLE) or DEFAULT_SOCKET).replace("%N", node)


class AgentClient:
    """One connection.  For one thread.

    In a select loop: `fileno` becomes readable, then `receive`.  After `join`, `look` or `hasten` call `receive` once
    too: what came before their answer was kept.
    """

    def __init__(self, path: str, *, trusted_uid: int = 0, connect_within_s: float = CONNECT_WITHIN_S) -> None:
        """Connect, and see that it is the agent.

        Raises:
            AgentAbsentError: nobody listens there, or it does not take the connection in time.
            AgentUntrustedError: the listener is not root's.
        """
        self._kept: deque[FromAgent] = deque(maxlen=KEPT_MAX)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        try:
            self._connect(path, connect_within_s)
            self._check(path, trusted_uid)
        except BaseException:
            self._socket.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _connect(self, path: str, within_s: float) -> None:
        # a full backlog makes connect wait; the kernel's own limit for that is the send timeout
        limit = _TIMEVAL.pack(int(within_s), int(within_s % 1 * 1e6))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        try:
            self._socket.connect(path)
        except OSError as error:
            why = f"it takes no connection in {within_s:g} s" if error.errno == errno.EAGAIN else error.strerror
            raise AgentAbsentError(f"{path}: no node agent: {why}") from error
        self._socket.setblocking(False)  # noqa: FBT003 - the method takes no keyword

    def _check(self, path: str, trusted_uid: int) -> None:
        packed = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        uid = _CREDENTIALS.unpack(packed)[1]  # of the process that called listen
        if uid != trusted_uid:
            raise AgentUntrustedError(f"{path}: uid {uid} listens there, not {trusted_uid}: not the node agent")

    def fileno(self) -> int:
        """For select."""
        return self._socket.fileno()

    def close(self) -> None:
        """Leave."""
        self._socket.close()

    def receive(self) -> list[FromAgent]:
        """Return what the agent has sent, without waiting.

        Raises:
            AgentGoneError: the connection is over, and all that came has been returned.
        """
        while len(self._kept) < PACKETS_PER_RECEIVE:
            try:
                if not self._take():
                    break
            except AgentGoneError:
                if not self._kept:
                    raise
                break  # the next call raises it again
        found = list(self._kept)
        self._kept.clear()
        return found

    def send(self, message: ToAgent) -> None:
        """Send without waiting for the answer, which comes with `receive`.

        Raises:
            AgentGoneError: the connection is over.
            AgentSilentError: the agent has not read what was sent before.
        """
        try:
            self._socket.send(encode(message), socket.MSG_NOSIGNAL)
        except BlockingIOError as error:
            raise AgentSilentError("the node agent does not read") from error
        except OSError as error:
            self._take_all()  # a refusal may have come before the end
            raise AgentGoneError(f"the node agent has left: {error.strerror}{self._last_refusal()}") from error

    def join(self, job_id: int, restart_count: int, *, version: str = "", within_s: float = JOIN_WITHIN_S) -> Joined:
        """Join; `Seen` comes with `receive` from now on.  Raises AgentError."""
        return self._ask(Join(job_id=job_id, restart_count=restart_count, version=version), Joined, within_s)

    def look(
        self,
        job_id: int,
        *,
        pci: str = "",
        ordinal: int | None = None,
        why: str = "",
        within_s: float = LOOK_WITHIN_S,
    ) -> Looked:
        """Have the agent look, and wait for what it finds.  Raises AgentError."""
        return self._ask(Look(job_id=job_id, pci=pci, ordinal=ordinal, why=why[:200]), Looked, within_s)

    def expedite(
        self,
        job_id: int,
        restart_count: int,
        exclude: tuple[str, ...] | None = None,
        *,
        within_s: float = ANSWER_WITHIN_S,
    ) -> Accepted:
        """Have the job made eligible as soon as it has been requeued.  Raises AgentError."""
        bytes_max = MESSAGE_BYTES_MAX - 128
        listed = exclude or ()
        if len(listed) > EXCLUDE_MAX or sum(len(name.encode()) + 3 for name in listed) > bytes_max:
            raise AgentError(f"{len(listed)} nodes to exclude are too many for one request: leave out the oldest")
        return self._ask(
            ExpediteRequeue(job_id=job_id, restart_count=restart_count, exclude=exclude), Accepted, within_s
        )

    def _ask(self, message: ToAgent, kind: type[_Answer], within_s: float) -> _Answer:
        self.send(message)
        give_up_at = time.monotonic() + within_s
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        while True:
            while self._take():
                newest = self._kept[-1]
                if isinstance(newest, kind):
                    self._kept.pop()
                    return newest
                if isinstance(newest, Refused) and newest.what in (_what(message), "connect"):
                    self._kept.pop()
                    raise AgentRefusedError(newest)
            left_s = give_up_at - time.monotonic()
            if left_s <= 0:
                raise AgentSilentError(f"no answer to `{_what(message)}` in {within_s:g} s")
            poll.poll(left_s * 1000 + 1)

    def _take(self) -> bool:
        """Receive one packet into `_kept`; False: there is none.  Packets of unknown types are skipped."""
        while True:
            try:
                packet = self._socket.recv(MESSAGE_BYTES_MAX)
            except BlockingIOError:
                return False
            except ConnectionResetError:
                continue  # it closed with something of ours unread; what it sent before can still be read
            except OSError as error:
                raise AgentGoneError(f"the node agent has left: {error.strerror}") from error
            if not packet:
                raise AgentGoneError("the node agent has left" + self._last_refusal())
            message = decode_from_agent(packet)
            if message is not None:
                self._kept.append(message)
                return True

    def _take_all(self) -> None:
        try:
            while len(self._kept) < KEPT_MAX and self._take():
                pass
        except AgentGoneError:
            return  # the caller says so

    def _last_refusal(self) -> str:
        refused = next((each for each in reversed(self._kept) if isinstance(each, Refused)), None)
        return f": {refused.why}" if refused else ""


def _what(message: ToAgent) -> str:
    return str(type(message).__struct_config__.tag)


def connect(environment: Mapping[str, str], node: str) -> AgentClient | None:
    """Return a connection to this node's agent, or None on a node without one.

    Raises:
        AgentUntrustedError: somebody else listens in its place.
    """
    path = socket_path(environment, node)
    if not os.path.exists(path):
        return None
    try:
        return AgentClient(path)
    except AgentAbsentError:
        return None
