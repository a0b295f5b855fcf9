"""What a job's processes and the node agent say to each other.

A Unix socket of type SEQPACKET: the kernel keeps message bounds, so there is no half-read frame to wait for.  One
JSON message a packet, at most `MESSAGE_BYTES_MAX` bytes; a longer or unreadable one ends the connection.  Fields are
only ever added, with defaults; both sides skip types that they do not know, so versions one apart work together.

The agent takes the peer's credentials from the kernel, never from a message.  The peer checks that the agent is root.
"""

from __future__ import annotations

import msgspec

from stepkeeper.node_agent.xid.catalogue import Action, Domain
from stepkeeper_trainer.formats.messages import fitted

MESSAGE_BYTES_MAX = 4096
EXCLUDE_MAX = 64  # nodes in one `ExpediteRequeue`
DEFAULT_SOCKET = "/run/stepkeeper/agent.sock"  # %N stands for the node's name
SOCKET_VARIABLE = "STEPKEEPER_AGENT_SOCKET"
UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


class _Message(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="type"):
    pass


# --- to the agent ---------------------------------------------------------------------------------


class Join(_Message, frozen=True, kw_only=True, tag="join"):
    """A watcher or supervisor of a job on this node: from now on `Seen` comes for the node's incidents.

    The agent answers with `Joined` or `Refused`.  It remembers that the job ran here, for `ExpediteRequeue`.
    """

    job_id: int
    restart_count: int
    version: str = ""


class Look(_Message, frozen=True, kw_only=True, tag="look"):
    """A rank failed in a way that hardware may explain: look now.  The agent believes only what it then sees."""

    job_id: int
    pci: str = ""
    ordinal: int | None = None  # as the job counts its GPUs
    why: str = ""


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


class Looked(_Message, frozen=True, kw_only=True, tag="looked"):
    """The answer to `Look`; incidents that it found come as `Seen` before."""

    found: int  # open incidents that a job should leave the node for; none where the agent only observes


class Accepted(_Message, frozen=True, kw_only=True, tag="accepted"):
    """The answer to `ExpediteRequeue`: it will be done."""


class Refused(_Message, frozen=True, kw_only=True, tag="refused"):
    """The answer to a request that was not granted."""

    what: str  # `join`, `look`, `hasten`; `connect` where the connection itself is too many
    why: str


ToAgent = Join | Look | ExpediteRequeue
FromAgent = Joined | Seen | Looked | Accepted | Refused


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
    """Parse what a user sent; None for a type that this version does not know.  Raises one of `UNREADABLE`."""
    try:
        return _to_agent.decode(packet)
    except msgspec.ValidationError:
        if _tag.decode(packet).type in _KNOWN_TO_AGENT:
            raise
        return None


def decode_from_agent(packet: bytes) -> FromAgent | None:
    """Parse what the agent sent; None for what this version does not know."""
    try:
        return _from_agent.decode(packet)
    except UNREADABLE:
        return None
