"""What torch writes of NCCL's flight recorder when a collective has timed out: a pickle, read as data.

Only opcodes that make dictionaries, lists, texts and numbers are let through to the unpickler, and it finds no names:
nothing is called, whatever the bytes are.  Needs no torch.
"""

from __future__ import annotations

import io
import pickle
import re
from typing import TYPE_CHECKING, Any

from stepkeeper_trainer.formats.decoding import DecodeError

if TYPE_CHECKING:
    from pathlib import Path

NAME = "nccl-of-rank-"  # with the rank, in the directory of the stacks
BYTES_MAX = 64 * 1024 * 1024

_FIXED = {  # the bytes that each takes -> opcodes
    1: (
        *(pickle.MARK, pickle.NONE, pickle.NEWTRUE, pickle.NEWFALSE, pickle.EMPTY_DICT, pickle.EMPTY_LIST),
        *(pickle.EMPTY_TUPLE, pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3),
        *(pickle.APPEND, pickle.APPENDS, pickle.SETITEM, pickle.SETITEMS),
    ),
    2: (pickle.PROTO, pickle.BININT1, pickle.BINPUT, pickle.BINGET),
    3: (pickle.BININT2,),
    5: (pickle.BININT, pickle.LONG_BINGET),
    9: (pickle.BINFLOAT,),
}
_PLACE_IN_MEMO = re.escape(pickle.LONG_BINPUT) + rb"..[\x00-\x0f]\x00"  # the reader makes room up to the place
_RUN = re.compile(
    b"(?s:"
    + b"|".join(b"[" + b"".join(map(re.escape, codes)) + b"].{%d}" % (width - 1) for width, codes in _FIXED.items())
    + b"|"
    + _PLACE_IN_MEMO
    + b"){0,1000}"  # bounded as in pickles.py
)
_COUNTED = {
    pickle.SHORT_BINUNICODE[0]: 1,
    pickle.LONG1[0]: 1,
    pickle.BINUNICODE[0]: 4,
}  # with the bytes of their length


class _Nameless(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        raise DecodeError(f"names {module}.{name}"[:200])


def file(directory: Path, rank: int) -> Path:
    """Return the file of a rank in the directory of the stacks."""
    return directory / f"{NAME}{rank}"


def parse(data: bytes) -> Any:
    """Return what a dump holds: dictionaries, lists, texts, numbers.

    Raises:
        DecodeError: it is torn, or something else than such a dump.
    """
    _check(data)
    try:
        return _Nameless(io.BytesIO(data)).load()
    except DecodeError:
        raise
    except Exception as error:  # damaged bytes can raise anything
        raise DecodeError(f"torn or damaged: {type(error).__name__}: {str(error)[:200]}") from error


def _check(data: bytes) -> None:
    """Raise DecodeError where a pickle does more than hold data."""
    at, end = 0, len(data)
    while at < end:
        found = _RUN.match(data, at)
        assert found is not None, "it matches nothing at least"
        at = found.end()
        if at >= end:
            break
        width = _COUNTED.get(data[at])
        if width is not None:
            at += 1 + width + int.from_bytes(data[at + 1 : at + 1 + width], "little")
        elif data[at] == pickle.STOP[0]:
            return
        elif found.end() == found.start():  # else there may be more than one call passes over
            raise DecodeError(f"does at byte {at} what no dump of a flight recorder does ({data[at : at + 1]!r})")
    raise DecodeError("is torn: it has no end")
