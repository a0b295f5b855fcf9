"""One stored tensor: the archive that `torch.save` makes of it, read without torch and without running anything.

It is a zip of stored entries: a pickle that says type, size and strides, and the data, aligned.  Everything before
the data is its head; archives of one type and size have the same head.

Pickles that are data are made of the opcodes that pickle's own writer uses for records.  Left out on purpose are the
ways to call things by text (INST, OBJ), by number (EXT) or from outside (NEXT_BUFFER), and a far place in the memo
(LONG_BINPUT), for which the reader would make room.
"""

from __future__ import annotations

import io
import math
import pickle
import re
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_STOP, _GLOBAL = pickle.STOP[0], pickle.GLOBAL[0]


class OpcodeError(ValueError):
    """The pickle does what none of its kind does, or has no end."""


class Opcodes:
    """What pickles of one kind are made of.

    Most of one is passed over by a call for many opcodes, and not by a turn of a loop for each.
    """

    def __init__(
        self,
        fixed: Mapping[bytes, int],
        counted: Mapping[bytes, int],
        *,
        kind: str,
        others: Sequence[bytes] = (),
        names: bool = False,
    ) -> None:
        """Take opcodes with the bytes that each takes, and those with the bytes of their length.

        `kind` is for errors, `others` are opcodes as regular expressions, and `names` are let through.
        """
        widths = sorted(set(fixed.values()))
        of_width = [b"".join(re.escape(code) for code, taken in fixed.items() if taken == width) for width in widths]
        runs = [b"[%b].{%d}" % (codes, width - 1) for codes, width in zip(of_width, widths, strict=True)]
        # a limit bounds the places that the matcher remembers to go back to (`*+`, which remembers none, is of 3.11)
        self._run = re.compile(b"(?s:" + b"|".join([*runs, *others]) + b"){0,1000}")
        self._fixed = frozenset(code[0] for code in fixed)
        self._counted = {code[0]: width for code, width in counted.items()}
        self._kind, self._names = kind, names

    def find_end(self, data: bytes, start: int = 0) -> int:
        """Return where a pickle ends; whatever comes after it is not looked at.

        Raises:
            OpcodeError: it is not to be read.
        """
        at, end = start, len(data)
        while at < end:
            begun, found = at, self._run.match(data, at)
            assert found is not None, "it matches nothing at least"
            at = found.end()
            if at >= end:
                break
            code = data[at]
            if (width := self._counted.get(code)) is not None:
                at += 1 + width + int.from_bytes(data[at + 1 : at + 1 + width], "little")
            elif code == _STOP:
                return at + 1
            elif self._names and code == _GLOBAL:
                line = data.find(b"\n", at)
                after = data.find(b"\n", line + 1)
                if line < 0 or after < 0:
                    break
                at = after + 1
            elif at == begun:  # else there may be more than one call passes over
                if code in self._fixed:
                    break  # it goes on behind the end
                raise OpcodeError(f"does at byte {at - start} what no {self._kind} does ({data[at : at + 1]!r})")
        raise OpcodeError("is torn: it has no end")


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
RECORDS = Opcodes(_FIXED, _COUNTED, kind="list of tensors")  # of `.metadata`
_TENSOR = Opcodes(  # of protocol 2, which `torch.save` uses
    {**_FIXED, pickle.BINPUT: 2, pickle.BINPERSID: 1}, _COUNTED, kind="list of tensors", names=True
)
HEAD_BYTES = 4096  # enough for nearly all
_LOCAL = struct.Struct("<4sHHHHHIIIHH")
_SIGNATURE = b"PK\x03\x04"
_STORAGES = {  # torch's names for storages of one type
    "DoubleStorage": ("float64", 8),
    "FloatStorage": ("float32", 4),
    "HalfStorage": ("float16", 2),
    "BFloat16Storage": ("bfloat16", 2),
    "LongStorage": ("int64", 8),
    "IntStorage": ("int32", 4),
    "ShortStorage": ("int16", 2),
    "CharStorage": ("int8", 1),
    "ByteStorage": ("uint8", 1),
    "BoolStorage": ("bool", 1),
    "ComplexDoubleStorage": ("complex128", 16),
    "ComplexFloatStorage": ("complex64", 8),
    "UntypedStorage": ("", 1),
}
_REBUILD_ARGUMENTS = {"_rebuild_tensor_v2": 4, "_rebuild_tensor_v3": 7}


class ItemError(ValueError):
    """The archive is no plain tensor: torn, or of a kind that is read otherwise."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the numbers of a tensor are in its archive."""

    head_bytes: int  # the data begins after it
    dtype: str  # `torch.` left out
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int  # in numbers, of the first one
    storage_bytes: int  # of all the data

    @property
    def contiguous(self) -> bool:
        """Whether the data is the tensor row by row, and nothing else."""
        return self.offset == 0 and contiguous(self.size, self.stride)


def contiguous(sizes: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether numbers of these strides lie one after the other in the order of their indices."""
    expected = 1
    for size, stride in zip(reversed(sizes), reversed(strides), strict=True):
        if size != 1 and stride != expected:
            return math.prod(sizes) == 0
        expected *= size
    return True


def read_head(data: bytes) -> Layout:
    """Read the head of an archive; `data` begins where it begins, and may end anywhere after the head.

    Raises:
        ItemError: it is none, or its head is longer than `data`.
    """
    try:
        return _read_head(data)
    except (OpcodeError, struct.error) as error:
        raise ItemError(f"its pickle {error}" if isinstance(error, OpcodeError) else "its head is cut off") from error


def _read_head(data: bytes) -> Layout:
    at, described = 0, None
    while True:
        signature, _, _, method, _, _, _, _, size, name_bytes, extra_bytes = _LOCAL.unpack_from(data, at)
        if signature != _SIGNATURE or method != 0:
            raise ItemError("it is no archive of stored entries")
        name_at = at + _LOCAL.size
        name = data[name_at : name_at + name_bytes]
        begin = name_at + name_bytes + extra_bytes
        end = begin + size
        if name.endswith(b"/data/0"):
            break
        if name.endswith(b"/data.pkl"):
            end = _TENSOR.find_end(data, begin)
            described = _unpickle(data[begin:end])
        elif name.endswith(b"/byteorder") and data[begin : begin + 6] != b"little":
            raise ItemError("its numbers are not little-endian")
        at = data.find(_SIGNATURE, end)
        if at < 0:
            raise ItemError("its head is cut off, or it has no data")
    if described is None:
        raise ItemError("it has no description before its data")
    dtype, item_bytes, count, sizes, strides, offset = described
    last = offset + sum((s - 1) * t for s, t in zip(sizes, strides, strict=True)) if math.prod(sizes) else -1
    if offset < 0 or (last + 1) * item_bytes > count:
        raise ItemError("its tensor is larger than its data")
    return Layout(begin, dtype, sizes, strides, offset, count)


def _unpickle(data: bytes) -> tuple[str, int, int, tuple[int, ...], tuple[int, ...], int]:
    try:
        rebuilt = _Restricted(io.BytesIO(data)).load()
        kind, arguments = rebuilt
        (storage, offset, size, stride), more = arguments[:4], arguments[4:]
        dtype, item_bytes, count = storage
        if kind == "_rebuild_tensor_v3":
            dtype, item_bytes = more[2].name, more[2].item_bytes
    except ItemError:
        raise
    except Exception as error:  # whatever damaged bytes can raise
        raise ItemError(f"its description cannot be read: {type(error).__name__}") from error
    if not dtype or not _numbers(size) or not _numbers(stride) or type(offset) is not int or type(count) is not int:
        raise ItemError("its description is not that of a tensor")
    return dtype, item_bytes, count, size, stride, offset


def _numbers(value: Any) -> bool:
    return type(value) is tuple and all(type(number) is int and number >= 0 for number in value)


class _Call:
    """Stands for a function of torch's: keeps what it was called with."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, *arguments: Any) -> tuple[str, tuple[Any, ...]]:
        if len(arguments) < _REBUILD_ARGUMENTS[self.name]:
            raise ItemError("its description lacks something")
        return self.name, arguments


class _Dtype:
    """A type of numbers of version 3, whose storages have none."""

    __slots__ = ("item_bytes", "name")

    def __init__(self, name: str) -> None:
        self.name = name
        self.item_bytes = 1


class _Restricted(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module == "torch._utils" and name in _REBUILD_ARGUMENTS:
            return _Call(name)
        if module == "torch" and name in _STORAGES:
            return _STORAGES[name]
        if (module, name) == ("torch.storage", "UntypedStorage"):
            return _STORAGES["UntypedStorage"]
        if (module, name) == ("collections", "OrderedDict"):
            return dict
        if module == "torch" and name.isidentifier() and name.islower():
            return _Dtype(name)
        raise ItemError(f"its description names {f'{module}.{name}'[:200]!r}: it is read otherwise")

    def persistent_load(self, value: Any) -> tuple[str, int, int]:
        """Return type, bytes a number and bytes in all of the storage."""
        kind, (dtype, item_bytes), key, _, count = value
        if kind != "storage" or key != "0":
            raise ItemError("its data is elsewhere")
        return dtype, item_bytes, count * item_bytes
