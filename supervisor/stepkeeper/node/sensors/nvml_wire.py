"""What the NVML child says to its parent: readings, and which call it begins.  One JSON line each."""

from __future__ import annotations

import msgspec

from stepkeeper.node.sensors.readings import Reading

LINE_BYTES_MAX = 65536
HEALTH = "health"  # the thread that asks every GPU, again and again,
REST = "rest"  # and what it says when it has done so
ENDS_ABSENT = 3  # the child's exit code: no library or no driver here; look again later
ENDS_TO_BEGIN_ANEW = 4  # the GPUs are not those that it listed: a new process sees what is there now


class Begins(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="reading", tag="begins"):
    """A thread of the child begins a call.  It says something again when the call is over."""

    lane: str  # the thread: `events` or `health`
    call: str  # `nvmlDeviceGetRemappedRows of 0000:3b:00.0`
    takes_s: float = 0.0  # as long as this is no sign of trouble: it waits on purpose


FromChild = Reading | Begins
UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)

_encoder = msgspec.json.Encoder()
_decoder: msgspec.json.Decoder[FromChild] = msgspec.json.Decoder(FromChild)


def encode(message: FromChild) -> bytes:
    """Return the line."""
    return _encoder.encode(message) + b"\n"


def decode(line: bytes) -> FromChild:
    """Parse a line.  Raises one of `UNREADABLE`."""
    return _decoder.decode(line)
