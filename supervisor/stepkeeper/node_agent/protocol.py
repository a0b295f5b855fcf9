"""What a job's processes and the node agent say to each other.

A Unix socket of type SEQPACKET: the kernel keeps message bounds, so there is no half-read frame to wait for.  One
JSON message a packet, at most `MESSAGE_BYTES_MAX` bytes; a longer or unreadable one ends the connection.  Fields are
only ever added, with defaults; both sides skip types that they do not know, so versions one apart work together.

The agent takes the peer's credentials from the kernel, never from a message.  The peer checks that the agent is root.
"""

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

import msgspec

from stepkeeper.node_agent.xid.catalogue import Action, Domain
from stepkeeper.run_store.lines import parsed
from stepkeeper_trainer.formats.messages import fitted
from stepkeeper_trainer.formats.plain import MismatchError, decode

MESSAGE_BYTES_MAX = 4096
EXCLUDE_MAX = 64  # nodes in one `ExpediteRequeue`
DEFAULT_SOCKET = "/run/stepkeeper/agent.sock"  # %N stands for the node's name
SOCKET_VARIABLE = "STEPKEEPER_AGENT_SOCKET"


class _Message(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="type"):
    pass


# --- to the agent ---------------------------------------------------------------------------------


class Join(_Message, frozen=True, kw_only=True, tag="join"):
    """A watcher or supervisor of a job on this node: from now on `Seen` comes for the node's incidents.

    The agent answers with `Joined` or `Refused`.  `Look` and `ExpediteRequeue` are about the job joined last.
    """

    job_id: int
    restart_count: int
    version: str = ""


class Look(_Message, frozen=True, kw_only=True, tag="look"):
    """A rank failed in a way that hardware may explain: look at all GPUs now.

    What the agent then sees comes as `Seen`, or nothing does.  It believes nothing else.
    """

    job_id: int
    why: str = ""  # for the agent's log


class ExpediteRequeue(_Message, frozen=True, kw_only=True, tag="hasten"):
    """Our job is about to be requeued: make it eligible at once; with `exclude`, away from those nodes.

    Answered with `Accepted` when the agent will do it once the job has left COMPLETING, or `Refused`.
    """

    job_id: int
    restart_count: int  # of the attempt that asks: the next one has a higher one
    exclude: tuple[str, ...] | None = None  # the whole list that the job shall have, merged; None: as it is


# --- from the agent -------------------------------------------------------------------------------


class Joined(_Message, frozen=True, kw_only=True, tag="joined"):
    """The job's processes are known."""

    node: str
    acts: bool  # False: the agent only observes
    version: str = ""


class Seen(_Message, frozen=True, kw_only=True, tag="seen"):
    """An incident of the node: sent when its action is decided, when it is raised, and on `Join` if it is open."""

    incident: str  # id: the same one again means that it was raised
    at: float  # Unix seconds, of the first sighting
    action: Action  # what the job may act on; of an agent that only observes never one that drains
    domain: Domain
    name: str  # `XID 79`
    pci: str = ""
    gpu: str = ""
    why: str = ""
    drained: bool = False  # the node is drained by the agent
    observed: Action | None = None  # mode observe: what the fault asks for; no job leaves the node for it


class Accepted(_Message, frozen=True, kw_only=True, tag="accepted"):
    """The answer to `ExpediteRequeue`: it will be done."""


class Refused(_Message, frozen=True, kw_only=True, tag="refused"):
    """The answer to a request that was not granted."""

    what: str  # `join`, `look`, `hasten`; `connect` where the connection itself is too many
    why: str


ToAgent = Join | Look | ExpediteRequeue
FromAgent = Joined | Seen | Accepted | Refused


class _Tag(msgspec.Struct):
    type: str


_KNOWN_TO_AGENT = ("join", "look", "hasten")
_tag = msgspec.json.Decoder(_Tag)
_to_agent: msgspec.json.Decoder[ToAgent] = msgspec.json.Decoder(ToAgent)
_from_agent: msgspec.json.Decoder[FromAgent] = msgspec.json.Decoder(FromAgent)


def encode(message: ToAgent | FromAgent) -> bytes:
    """Return the packet; free text that the caller has not shortened is cut."""
    return fitted(message, MESSAGE_BYTES_MAX)[0]


def decode_to_agent(packet: bytes) -> ToAgent | None:
    """Parse what a user sent; None for a type that this version does not know.  Raises DecodeError."""
    try:
        return decode(_to_agent, packet)
    except MismatchError:
        if decode(_tag, packet).type in _KNOWN_TO_AGENT:
            raise
        return None


def decode_from_agent(packet: bytes) -> FromAgent | None:
    """Parse what the agent sent; None for what this version does not know."""
    return parsed(_from_agent, packet)


# A watcher's or supervisor's side of the agent's socket.  Light: watchers import it.

ANSWER_WITHIN_S = 5.0
JOIN_WITHIN_S = 15.0  # the agent may have to ask Slurm
CONNECT_WITHIN_S = 2.0
PACKETS_PER_RECEIVE = 64
KEPT_MAX = 256
_CREDENTIALS = struct.Struct("iII")  # pid, uid, gid: struct ucred
_TIMEVAL = struct.Struct("ll")
_Answer = TypeVar("_Answer", Joined, Accepted)


class Credentials(msgspec.Struct, frozen=True, kw_only=True):
    """Of the process at the other end of a socket, as it connected or listened."""

    pid: int  # 0: not to be seen from here
    uid: int


def credentials(sock: socket.socket) -> Credentials:
    """Return who is at the other end."""
    pid, uid, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return Credentials(pid=pid, uid=uid)


class AgentError(Exception):
    """The agent cannot be used as wished."""


class AgentAbsentError(AgentError):
    """No agent listens there: a site without it, or it restarts."""


class AgentGoneError(AgentError):
    """The connection is over: connect again later."""


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

    In a select loop: `fileno` becomes readable, then `receive`.  After `join` or `expedite` call `receive` once too:
    what came before their answer was kept.
    """

    def __init__(self, path: str, *, trusted_uid: int = 0, connect_within_s: float = CONNECT_WITHIN_S) -> None:
        """Connect, and see that it is the agent.

        Raises:
            AgentAbsentError: nobody listens there, or it does not take the connection in time.
            AgentError: the listener is not root's.
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
        uid = credentials(self._socket).uid  # of the process that called listen
        if uid != trusted_uid:
            raise AgentError(f"{path}: uid {uid} listens there, not {trusted_uid}: not the node agent")

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
            AgentError: the agent has not read what was sent before.
        """
        try:
            self._socket.send(encode(message), socket.MSG_NOSIGNAL)
        except BlockingIOError as error:
            raise AgentError("the node agent does not read") from error
        except OSError as error:
            while self._take():  # a refusal may have come before the end, which this raises
                pass
            raise AgentGoneError(f"the node agent has left: {error.strerror}") from error

    def join(self, job_id: int, restart_count: int, *, version: str = "", within_s: float = JOIN_WITHIN_S) -> Joined:
        """Join; `Seen` comes with `receive` from now on.  Raises AgentError."""
        return self._ask(Join(job_id=job_id, restart_count=restart_count, version=version), Joined, within_s)

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
                raise AgentError(f"no answer to `{_what(message)}` in {within_s:g} s")
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
                refused = next((each for each in reversed(self._kept) if isinstance(each, Refused)), None)
                raise AgentGoneError("the node agent has left" + (f": {refused.why}" if refused else ""))
            message = decode_from_agent(packet)
            if message is not None:
                self._kept.append(message)
                return True


def _what(message: ToAgent) -> str:
    return str(type(message).__struct_config__.tag)


def connect(environment: Mapping[str, str], node: str) -> AgentClient | None:
    """Return a connection to this node's agent, or None on a node without one.

    Raises:
        AgentError: somebody else listens in its place.
    """
    path = socket_path(environment, node)
    if not os.path.exists(path):
        return None
    try:
        return AgentClient(path)
    except AgentAbsentError:
        return None
