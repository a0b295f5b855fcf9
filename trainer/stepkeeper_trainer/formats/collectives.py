"""Where a rank stands: its stacks, and its collectives by torch's flight recorder.

The stacks go to a file of the rank: `faulthandler` writes them in the signal's own handler, in whatever system call the
rank waits, and no Python code runs.

Of the flight recorder (thousands of entries in JSON) the rank makes one `Place` a group, for its node's watcher: the
newest collective that it entered, and what is open.

What NCCL writes by itself when a collective times out is a pickle of the same, read as data.  Only opcodes that make
dictionaries, lists, texts and numbers are let through to the unpickler, and it finds no names: nothing is called,
whatever the bytes are.  Needs no torch.
"""

from __future__ import annotations

import io
import pickle
import re
import signal
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import msgspec

from stepkeeper_trainer.formats.items import OpcodeError, Opcodes
from stepkeeper_trainer.formats.plain import DecodeError, MismatchError, decode

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path


STACKS_DIRECTORY = "stacks"  # below the logs of a launch
STACKS_SIGNAL = signal.SIGRTMIN + 9  # of the real-time signals nobody's own: Slurm, CUDA and NCCL use none of them


def stacks_file(run_directory: Path, attempt: int, launch: int, rank: int) -> Path:
    """Return the file of a rank."""
    logs = run_directory / "logs" / f"attempt-{attempt:03d}" / f"launch-{launch:03d}"
    return logs / STACKS_DIRECTORY / f"rank-{rank}.txt"


SIGNAL = signal.SIGRTMIN + 10  # beside that of the stacks: has a rank write where it is
GROUPS_MAX = 6  # of a rank: those with something open first, then those used last
FILE_BYTES_MAX = 64 * 1024
RAW_BYTES_MAX = 8 * 1024 * 1024  # of one recorder's own words, kept for people
RANKS_MAX = 1 << 20  # of a job: a damaged word makes no larger set
NUMBER_MAX = 2**63 - 1
_MEMBERS_CHARACTERS_MAX = 160
_NAME_CHARACTERS_MAX = 60
_DIMENSIONS_MAX = 8
_NO_DESCRIPTION = ("", "undefined")
_BACKENDS = ("nccl:", "gloo:", "c10d:", "ucc:", "mpi:", "xccl:")


class Place(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Where a rank is in one group."""

    group: str  # its name, which all its ranks use
    what: str = ""  # its description
    members: str = ""  # ranks, as of `compress`; nothing where that is too long or not known
    last: int = 0  # number of the newest collective that the rank entered
    last_op: str = ""
    at: int | None = None  # number of the oldest that it entered and that has not ended; None: all have
    op: str = ""  # of that one
    shape: str = ""  # of its first input: `64x128 Float`
    queued: bool = False  # the GPU has not begun it
    direct: bool = False  # between two ranks: numbers count on each of them by itself
    issued: bool = False  # NCCL's own counts: of what the rank has issued, whatever its GPU has entered


class Account(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a rank writes when it is asked."""

    rank: int
    places: tuple[Place, ...] = ()


class _Entry(msgspec.Struct, frozen=True):
    process_group: tuple[str, str]
    collective_seq_id: int
    state: str
    p2p_seq_id: int = 0
    profiling_name: str = ""
    input_sizes: tuple[tuple[int, ...], ...] = ()
    input_dtypes: tuple[str, ...] = ()
    retired: bool = False
    is_p2p: bool = False
    time_created_ns: int = 0


class _Group(msgspec.Struct, frozen=True):
    ranks: str = ""


class _Dump(msgspec.Struct, frozen=True):
    entries: tuple[_Entry, ...] = ()
    pg_config: dict[str, _Group] = {}


_dump: msgspec.json.Decoder[_Dump] = msgspec.json.Decoder(_Dump)
_account: msgspec.json.Decoder[Account] = msgspec.json.Decoder(Account)


def file(directory: Path, rank: int) -> Path:
    """Return the file of a rank's account, in the logs of its launch."""
    return directory / STACKS_DIRECTORY / f"collectives-rank-{rank}.json"


def raw_file(directory: Path, rank: int, recorder: str) -> Path:
    """Return the file of what the recorder itself said, for people."""
    return directory / STACKS_DIRECTORY / f"flight-recorder-{recorder}-rank-{rank}.json"


def decode_account(data: bytes) -> Account:
    """Read what a rank wrote.  Raises DecodeError."""
    return decode(_account, data)


def trim(place: Place) -> Place:
    """Return what fits into one line of the bus, whatever a rank has written."""
    return Place(
        group=_plain(place.group),
        what=_plain(place.what),
        members=_plain(place.members, _MEMBERS_CHARACTERS_MAX),
        last=_number(place.last),
        last_op=_plain(place.last_op),
        at=None if place.at is None else _number(place.at),
        op=_plain(place.op),
        shape=_plain(place.shape),
        queued=place.queued,
        direct=place.direct,
        issued=place.issued,
    )


def _plain(text: str, characters_max: int = _NAME_CHARACTERS_MAX) -> str:
    """Cut a text, each character one byte in JSON."""
    cut = text[:characters_max]
    return "".join(each if each.isascii() and each.isprintable() and each not in '"\\' else "?" for each in cut)


def _number(number: int) -> int:
    return min(max(0, number), NUMBER_MAX)


def reduce(dumps: Iterable[tuple[bytes, bool]], members: Mapping[str, str] | None = None) -> tuple[Place, ...]:
    """Return where a rank is in its groups.

    Args:
        dumps: each recorder's JSON, and whether it is that of GPUs, which tells what they have begun and completed:
            the one of CPU groups tells only what has ended.
        members: torch's lists of the ranks of groups, by their names, where a recorder does not tell them.

    Raises:
        DecodeError: it is not what torch writes.
    """
    return _reduce(((decode(_dump, data), of_gpu) for data, of_gpu in dumps), members or {})


def reduce_parsed(dump: object, *, of_gpu: bool = True) -> tuple[Place, ...]:
    """Return the same of what `parse_nccl_dump` returned.

    Raises:
        DecodeError: it is not what torch writes.
    """
    try:
        return _reduce([(msgspec.convert(dump, _Dump), of_gpu)], {})
    except (msgspec.ValidationError, RecursionError) as error:
        raise MismatchError(str(error)) from error


def _reduce(dumps: Iterable[tuple[_Dump, bool]], members: Mapping[str, str]) -> tuple[Place, ...]:
    found: list[tuple[bool, int, Place]] = []
    for dump, of_gpu in dumps:
        groups: dict[tuple[str, str, bool], list[_Entry]] = {}
        for entry in dump.entries:
            groups.setdefault((*entry.process_group, entry.is_p2p), []).append(entry)
        for (name, what, direct), entries in groups.items():
            config = dump.pg_config.get(name)
            ranks = config.ranks if config is not None else members.get(name, "")
            place = _place(name, what, entries, members=ranks, direct=direct, of_gpu=of_gpu)
            found.append((place.at is None, -max(entry.time_created_ns for entry in entries), place))
    found.sort(key=lambda each: each[:2])
    return tuple(trim(place) for _, _, place in found[:GROUPS_MAX])


def _place(name: str, what: str, entries: Sequence[_Entry], *, members: str, direct: bool, of_gpu: bool) -> Place:
    def number(entry: _Entry) -> int:
        return entry.p2p_seq_id if direct else entry.collective_seq_id

    last = max(entries, key=number)
    pending = [entry for entry in entries if not _has_ended(entry, of_gpu=of_gpu)]
    first = min(pending, key=number, default=None)
    return Place(
        group=name,
        what="" if what in _NO_DESCRIPTION else what,
        members=compress(members),
        last=number(last),
        last_op=_op(last),
        at=number(first) if first is not None else None,
        op=_op(first) if first is not None else "",
        shape=_shape(first) if first is not None else "",
        queued=of_gpu and first is not None and first.state == "scheduled",
        direct=direct,
    )


def _has_ended(entry: _Entry, *, of_gpu: bool) -> bool:
    """Tell whether a collective has: on a GPU one that is retired and not completed has run out of time."""
    return entry.state == "completed" or (entry.retired and not of_gpu)


def _op(entry: _Entry) -> str:
    name = entry.profiling_name
    for backend in _BACKENDS:
        name = name.removeprefix(backend)
    return name


def _shape(entry: _Entry) -> str:
    if not entry.input_sizes:
        return ""
    sizes = "x".join(map(str, entry.input_sizes[0][:_DIMENSIONS_MAX])) or "1"
    kind = f" {entry.input_dtypes[0]}" if entry.input_dtypes else ""
    more = f" and {len(entry.input_sizes) - 1} more" if len(entry.input_sizes) > 1 else ""
    return f"{sizes}{kind}{more}"


def compress(ranks: str) -> str:
    """Shorten torch's list of a group's ranks; nothing where it cannot be told in short.

    >>> compress("[0, 1, 2, 3]"), compress("[1, 9, 17]"), compress("[5]"), compress("[0, 1, 5]"), compress("?")
    ('0-3', '1-17:8', '5', '0,1,5', '')
    """
    words = ranks.strip("[] ")
    if not all(word.strip().isdecimal() for word in words.split(",")):
        return ""
    numbers = [int(word) for word in words.split(",")]
    strides = {after - before for before, after in pairwise(numbers)}
    if len(numbers) > 2 and len(strides) == 1 and min(strides) > 0:  # noqa: PLR2004 - two are said by themselves
        stride = min(strides)
        return f"{numbers[0]}-{numbers[-1]}" + (f":{stride}" if stride > 1 else "")
    text = ",".join(map(str, numbers))
    return text if len(text) <= _MEMBERS_CHARACTERS_MAX else ""


def expand(members: str) -> frozenset[int]:
    """Return the ranks that `compress` shortened; none where it is not what it writes.

    >>> sorted(expand("1-17:8")), sorted(expand("0,1,5")), sorted(expand("3-1")), sorted(expand("x"))
    ([1, 9, 17], [0, 1, 5], [], [])
    """
    span, _, stride = members.partition(":")
    first, _, last = span.partition("-")
    if first.isdecimal() and last.isdecimal():
        step = int(stride) if stride.isdecimal() and int(stride) else 1
        if int(last) < RANKS_MAX:
            return frozenset(range(int(first), int(last) + 1, step))
        return frozenset()
    words = members.split(",")
    return frozenset(map(int, words)) if all(word.isdecimal() for word in words) else frozenset()


NCCL_DUMP_NAME = "nccl-of-rank-"  # with the rank, in the directory of the stacks
NCCL_DUMP_BYTES_MAX = 64 * 1024 * 1024

_DUMP_OPCODES = Opcodes(
    {
        **dict.fromkeys((pickle.MARK, pickle.NONE, pickle.NEWTRUE, pickle.NEWFALSE, pickle.EMPTY_DICT), 1),
        **dict.fromkeys((pickle.EMPTY_LIST, pickle.EMPTY_TUPLE, pickle.TUPLE), 1),
        **dict.fromkeys((pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3), 1),
        **dict.fromkeys((pickle.APPEND, pickle.APPENDS, pickle.SETITEM, pickle.SETITEMS), 1),
        **dict.fromkeys((pickle.PROTO, pickle.BININT1, pickle.BINPUT, pickle.BINGET), 2),
        pickle.BININT2: 3,
        pickle.BININT: 5,
        pickle.LONG_BINGET: 5,
        pickle.BINFLOAT: 9,
    },
    {pickle.SHORT_BINUNICODE: 1, pickle.LONG1: 1, pickle.BINUNICODE: 4},
    kind="dump of a flight recorder",
    others=[re.escape(pickle.LONG_BINPUT) + rb"..[\x00-\x0f]\x00"],  # the reader makes room up to the place in the memo
)


class _Nameless(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        raise DecodeError(f"names {module}.{name}"[:200])


def nccl_dump_file(directory: Path, rank: int) -> Path:
    """Return the file of a rank in the directory of the stacks."""
    return directory / f"{NCCL_DUMP_NAME}{rank}"


def parse_nccl_dump(data: bytes) -> Any:
    """Return what a dump holds: dictionaries, lists, texts, numbers.

    Raises:
        DecodeError: it is torn, or something else than such a dump.
    """
    try:
        _DUMP_OPCODES.find_end(data)
        return _Nameless(io.BytesIO(data)).load()
    except DecodeError:
        raise
    except OpcodeError as error:
        raise DecodeError(str(error)) from error
    except Exception as error:  # damaged bytes can raise anything
        raise DecodeError(f"torn or damaged: {type(error).__name__}: {str(error)[:200]}") from error
