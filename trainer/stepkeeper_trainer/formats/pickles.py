"""Which pickles are data: those made of the opcodes that pickle's own writer uses for records.

Left out on purpose are the ways to call things by text (INST, OBJ), by number (EXT) or from outside
(NEXT_BUFFER), and a far place in the memo (LONG_BINPUT), for which the reader would make room.
"""

from __future__ import annotations

import pickle
import re

_FIXED = {  # with the bytes each takes
    **dict.fromkeys((pickle.MARK, pickle.POP, pickle.NONE, pickle.MEMOIZE, pickle.STACK_GLOBAL), 1),
    **dict.fromkeys((pickle.EMPTY_DICT, pickle.EMPTY_LIST, pickle.EMPTY_TUPLE, pickle.TUPLE, pickle.REDUCE), 1),
    **dict.fromkeys((pickle.APPEND, pickle.APPENDS, pickle.SETITEM, pickle.SETITEMS, pickle.BUILD, pickle.NEWOBJ), 1),
    **dict.fromkeys((pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3, pickle.NEWTRUE, pickle.NEWFALSE), 1),
    **dict.fromkeys((pickle.NEWOBJ_EX, pickle.EMPTY_SET, pickle.ADDITEMS, pickle.FROZENSET, pickle.POP_MARK), 1),
    **dict.fromkeys((pickle.PROTO, pickle.BININT1, pickle.BINGET), 2),
    pickle.BININT2: 3,
    pickle.BININT: 5,
    pickle.LONG_BINGET: 5,
    pickle.BINFLOAT: 9,
    pickle.FRAME: 9,
}
_COUNTED = {  # with the bytes of their length
    **dict.fromkeys((pickle.SHORT_BINUNICODE, pickle.SHORT_BINBYTES, pickle.LONG1), 1),
    **dict.fromkeys((pickle.BINUNICODE, pickle.BINBYTES), 4),
    pickle.BINUNICODE8: 8,
}
_ADVANCE = [_FIXED.get(bytes([code]), 0) for code in range(256)]


def _of_width(width: int) -> bytes:
    codes = b"".join(re.escape(code) for code, bytes_taken in _FIXED.items() if bytes_taken == width)
    return b"[" + codes + b"].{%d}" % (width - 1)


# most of a pickle: passed over by one call, and not by a turn of the loop for each.  A limit bounds the places that the
# matcher remembers to go back to (`*+`, which remembers none, is of Python 3.11)
_RUN = re.compile(b"(?s:" + b"|".join(map(_of_width, sorted(set(_FIXED.values())))) + b"){0,1000}")
_LENGTH_BYTES = {code[0]: width for code, width in _COUNTED.items()}
_STOP, _GLOBAL = pickle.STOP[0], pickle.GLOBAL[0]
_TENSOR_ITEM = {pickle.BINPUT[0]: 2, pickle.BINPERSID[0]: 1}  # of protocol 2, which `torch.save` uses


class OpcodeError(ValueError):
    """The pickle does what no pickle of records does, or has no end."""


def find_end(data: bytes, start: int = 0, *, tensor_item: bool = False) -> int:
    """Return where a pickle of records ends.

    Args:
        data: the pickle, and whatever comes after it.
        start: where it begins.
        tensor_item: it is one of `torch.save`, not `.metadata`.

    Raises:
        OpcodeError: it is not to be read.
    """
    at, end, run = start, len(data), _RUN.match
    while at < end:
        found = run(data, at)
        assert found is not None, "it matches nothing at least"
        at = found.end()
        if at >= end:
            break
        code = data[at]
        if taken := _ADVANCE[code]:
            if at + taken > end:
                break  # it goes on behind the end
            continue  # the run was longer than one call passes over
        if (width := _LENGTH_BYTES.get(code)) is not None:
            at += 1 + width + int.from_bytes(data[at + 1 : at + 1 + width], "little")
        elif code == _STOP:
            return at + 1
        elif tensor_item and code in _TENSOR_ITEM:
            at += _TENSOR_ITEM[code]
        elif tensor_item and code == _GLOBAL:
            line = data.find(b"\n", at)
            after = data.find(b"\n", line + 1)
            if line < 0 or after < 0:
                break
            at = after + 1
        else:
            raise OpcodeError(f"does at byte {at - start} what no list of tensors does ({data[at : at + 1]!r})")
    raise OpcodeError("is torn: it has no end")
