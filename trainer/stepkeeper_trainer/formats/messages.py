"""What ranks, their wrappers and their node's watcher say to each other: one datagram, one JSON object.

A datagram is at most `MESSAGE_BYTES_MAX` bytes, so that the watcher can pass it on over Slurm's stdio
whole.  Fields are only ever added, with defaults: a reader skips fields that it does not know, and types
that it does not know, so that a rank and a watcher one version apart understand each other.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeVar

import msgspec

from stepkeeper_trainer.formats.plain import MismatchError, decode

T = TypeVar("T")
MESSAGE_BYTES_MAX = 800  # leaves room for the watcher's envelope in a line of 1,024 bytes
TEXT_CHARACTERS_MAX = 200  # of free text in a message
_CHARACTER_BYTES_MAX = 6  # in JSON
_TEXT_BYTES_MAX = 360  # of the same: quotes take two bytes in JSON, some characters four


class _Message(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="type"):
    launch: str = ""  # "ATTEMPT.LAUNCH", from the environment: a late word of an older launch is told apart


# --- from the wrapper around each rank ------------------------------------------------------------


class TaskStarted(_Message, frozen=True, kw_only=True, tag="task_started"):
    """The wrapper is about to become a rank's parent."""

    rank: int
    local_rank: int
    pid: int  # of the rank itself
    warm: bool = False  # a standby that had imported torch became the rank
    cold: str = ""  # why not, where one was looked for


class TaskExited(_Message, frozen=True, kw_only=True, tag="task_exited"):
    """A rank's process ended.  Exactly one of `code` and `signal` is set."""

    rank: int
    code: int | None = None
    signal: int | None = None
    at: float  # Unix seconds


# --- from the trainer library in each rank --------------------------------------------------------


class Hello(_Message, frozen=True, kw_only=True, tag="hello"):
    """The trainer library is there: this script can save, stop and resume; or, with `unable`, it cannot."""

    rank: int
    world_size: int
    pid: int
    version: str
    resumed_step: int | None = None
    in_memory: bool = False  # the nodes alone hold that step, as a snapshot
    total_steps: int | None = None  # when the work is done, where the script says it
    framework: str = ""  # whose checkpoints it saves, with its version; empty: our own
    memory: str = ""  # where its node holds snapshots of the run; the watcher removes them when the run leaves the node
    unable: str = ""  # why it saves nothing on request after all: this rank counts as one without the library


class Progress(_Message, frozen=True, kw_only=True, tag="progress"):
    """A step was completed.  Sent by rank 0 for each step, by the others at most once a second."""

    rank: int
    step: int
    tokens: int
    loss: float | None = None  # from rank 0; the newest known, which may be of the step before
    step_seconds: float | None = None
    not_finite: bool = False  # the loss is NaN or infinite: JSON has no word for these
    own_seconds: float | None = None  # what this rank worked itself for a step, without waiting for others
    loading_seconds: float | None = None  # of them, before the first forward: loading data
    held_step: int | None = None  # the newest snapshot that the memory of all nodes holds


class Replayed(_Message, frozen=True, kw_only=True, tag="replayed"):
    """Rank 0: steps after a resume were done again, and their losses compared with those recorded the first time."""

    step: int  # the last one
    steps: int  # that were compared
    first: int | None = None  # whose loss is another one
    worst: int | None = None  # whose loss is furthest from the recorded one
    then: float | None = None  # the recorded loss of that one; None: no finite number
    now: float | None = None
    deterministic: bool = False  # the run says that it is, and nothing that losses depend on has changed
    changed: str = ""  # what has


class Corrupted(_Message, frozen=True, kw_only=True, tag="corrupted"):
    """A rank came to other bits where it computed a micro-batch again: its device computes wrongly."""

    rank: int
    step: int  # that was done before it
    confirmed: int  # the newest step at which all ranks came to the same bits
    what: str = ""  # differs: the loss, names of gradients
    gpu: str = ""


class SaveStarted(_Message, frozen=True, kw_only=True, tag="save_started"):
    """Rank 0: all ranks have agreed to save `step`."""

    step: int
    save_id: str
    emergency: bool = False


class Committed(_Message, frozen=True, kw_only=True, tag="committed"):
    """Rank 0: the step directory is complete and durable."""

    step: int
    save_id: str
    directory: str  # name below checkpoints/
    bytes: int
    seconds: float  # from the request to durable
    emergency: bool = False
    drift: str = ""  # tensors whose copies differ between ranks: a device may compute wrongly
    by_disk: bool = False  # it came by way of the nodes' own disks
    framework: str = ""  # it is a checkpoint of this framework, and `directory` its path


class SaveFailed(_Message, frozen=True, kw_only=True, tag="save_failed"):
    """Rank 0: nothing was committed for `step`; older steps are untouched."""

    step: int
    save_id: str
    error: str
    emergency: bool = False


class Finished(_Message, frozen=True, kw_only=True, tag="finished"):
    """Rank 0: the work is done, and its last step is saved."""

    step: int


class Stopped(_Message, frozen=True, kw_only=True, tag="stopped"):
    """Rank 0: all ranks leave at `step` because they were asked to; `save_id` is what they saved."""

    step: int
    save_id: str | None = None


# --- from the watcher to a rank -------------------------------------------------------------------


class SaveRequest(_Message, frozen=True, kw_only=True, tag="save_request"):
    """Save at the next common step boundary, by `deadline_at` if it is set; then leave if `stop`."""

    request_id: int
    stop: bool
    deadline_at: float | None = None  # Unix seconds
    why: str = ""


FromRank = (
    TaskStarted
    | TaskExited
    | Hello
    | Progress
    | Replayed
    | Corrupted
    | SaveStarted
    | Committed
    | SaveFailed
    | Finished
    | Stopped
)
ToRank = SaveRequest

_encoder = msgspec.json.Encoder()
_from_rank: msgspec.json.Decoder[FromRank] = msgspec.json.Decoder(FromRank)
_to_rank: msgspec.json.Decoder[ToRank] = msgspec.json.Decoder(ToRank)


def shorten(text: str) -> str:
    r"""Cut free text so that a message stays within its limit, and keep it on one line.

    >>> shorten("No space\n left"), len(shorten("x" * 999))
    ('No space left', 200)
    """
    line = " ".join(text.split())[:TEXT_CHARACTERS_MAX]
    plain = "".join(character if character.isprintable() else "?" for character in line)
    return plain.encode()[:_TEXT_BYTES_MAX].decode(errors="ignore")


def fitted(message: msgspec.Struct, bytes_max: int) -> tuple[bytes, str]:
    """Return a message in at most so many bytes, and what had to be done to that end; "" where nothing had.

    Its longest texts are cut.  What cannot be cut enough becomes no message at all.

    >>> fitted(Stopped(launch="0.0", step=1), 50)
    (b'{"type":"stopped","launch":"0.0","step":1}', '')
    """
    data = _encoder.encode(message)
    if len(data) <= bytes_max:
        return data, ""
    said = f"a message {type(message).__name__} had {len(data)} bytes and may have {bytes_max}: "
    plain = msgspec.json.decode(data)
    while (excess := len(data) - bytes_max) > 0:
        texts = [(holder, key) for holder, key in _texts(plain) if holder[key]]
        if not texts:
            return b"{}", f"{said}it was not sent"
        holder, key = max(texts, key=lambda place: len(place[0][place[1]]))
        holder[key] = holder[key][: -max(1, excess // _CHARACTER_BYTES_MAX)]
        data = _encoder.encode(plain)
    return data, f"{said}it was cut"


def _texts(plain: Any) -> Iterator[tuple[Any, Any]]:
    """Yield each place of a text in what a message is made of: what holds it, and the key there."""
    for key, value in plain.items() if isinstance(plain, dict) else enumerate(plain):
        if isinstance(value, str) and key != "type":
            yield plain, key
        elif isinstance(value, (dict, list)):
            yield from _texts(value)


def encode(message: FromRank | ToRank) -> bytes:
    """Return the datagram.  A message over the limit is a mistake of the caller (see `shorten`), and is cut."""
    return fitted(message, MESSAGE_BYTES_MAX)[0]


def decode_from_rank(data: bytes) -> FromRank | None:
    """Parse a datagram of a rank; None for one that this version does not know.  Raises DecodeError."""
    return _decode(_from_rank, data)


def decode_to_rank(data: bytes) -> ToRank | None:
    """Parse a datagram to a rank; None for one that this version does not know.  Raises DecodeError."""
    return _decode(_to_rank, data)


def _decode(decoder: msgspec.json.Decoder[T], data: bytes) -> T | None:
    try:
        return decode(decoder, data)
    except MismatchError:
        return None
