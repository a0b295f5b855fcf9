"""The safetensors format: eight bytes of length, a JSON header, then the tensors' bytes without a gap.

And the layout in which model hubs keep large models: several such files and an index that names the file of
each tensor.  Needs no torch, and not the `safetensors` library, against which the tests compare.

Numbers are turned from one floating-point type into another block by block, rounded to the nearest, ties to even, as
torch does.  bfloat16 is done on whole blocks at once, as one large integer: a float32 has its bfloat16 in its upper
half.
"""

from __future__ import annotations

import array
import functools
import json
import math
import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stepkeeper_trainer.formats.plain import open_plain

SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
HEADER_BYTES_MAX = 100_000_000  # of the format itself
INDEX_BYTES_MAX = 1024 * 1024 * 1024
ALIGNMENT = 8
# torch's names, the format's, and bytes
_KINDS = (
    ("float64", "F64", 8), ("int64", "I64", 8), ("uint64", "U64", 8), ("complex64", "C64", 8),
    ("float32", "F32", 4), ("int32", "I32", 4), ("uint32", "U32", 4),
    ("bfloat16", "BF16", 2), ("float16", "F16", 2), ("int16", "I16", 2), ("uint16", "U16", 2),
    ("uint8", "U8", 1), ("int8", "I8", 1), ("bool", "BOOL", 1),
    ("float8_e4m3fn", "F8_E4M3", 1), ("float8_e5m2", "F8_E5M2", 1),
)  # fmt: skip
KIND_OF = {torch_name: kind for torch_name, kind, _ in _KINDS}
TORCH_OF = {kind: torch_name for torch_name, kind, _ in _KINDS}
ITEM_BYTES = {torch_name: count for torch_name, _, count in _KINDS}


class SafetensorsError(ValueError):
    """The file is no safetensors file, or is damaged."""


@dataclass(frozen=True, slots=True)
class Slot:
    """One tensor of a file."""

    dtype: str  # torch's name
    shape: tuple[int, ...]
    begin: int  # byte of the file
    end: int


def shard_name(number: int, count: int) -> str:
    """Return the name of a file of a sharded model; the first is number 1.

    >>> shard_name(1, 1), shard_name(2, 12)
    ('model.safetensors', 'model-00002-of-00012.safetensors')
    """
    return SINGLE_NAME if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors"


def pack_header(tensors: Sequence[tuple[str, str, tuple[int, ...]]], metadata: Mapping[str, str]) -> bytes:
    """Return the bytes before the data, for tensors (name, torch's dtype, shape) in the order of their data.

    Raises:
        SafetensorsError: a dtype has no name in the format, or there are too many names.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    at = 0
    for name, dtype, shape in tensors:
        if dtype not in KIND_OF:
            raise SafetensorsError(f"{name} is {dtype}: the format has no such numbers")
        end = at + math.prod(shape) * ITEM_BYTES[dtype]
        header[name] = {"dtype": KIND_OF[dtype], "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    if len(text) > HEADER_BYTES_MAX:
        raise SafetensorsError(f"a header of {len(text)} bytes: the format allows {HEADER_BYTES_MAX}")
    return struct.pack("<Q", len(text)) + text


def pack_index(files: Mapping[str, str], total_bytes: int) -> bytes:
    """Return the index of a sharded model: the file of each tensor."""
    document = {"metadata": {"total_size": total_bytes}, "weight_map": dict(sorted(files.items()))}
    return json.dumps(document, indent=2).encode() + b"\n"


def read_header(path: Path, *, within: Path | None = None) -> tuple[dict[str, Slot], dict[str, str]]:
    """Return the tensors of a file and what it says of itself; with `within`, no link below that one is followed.

    Raises:
        SafetensorsError: it is damaged: whatever a header may not say is refused before a byte is used.
        OSError: it cannot be read.
    """
    with open(path, "rb") if within is None else open_plain(path, within=within) as file:
        size = os.fstat(file.fileno()).st_size
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == len(struct.pack("<Q", 0)) else -1
        if not 2 <= length <= min(HEADER_BYTES_MAX, size - 8):  # noqa: PLR2004 - `{}`
            raise SafetensorsError(f"{path}: no safetensors file: its header would have {length} of {size} bytes")
        text = file.read(length)
    try:
        header = json.loads(text, object_pairs_hook=_no_twins)
        metadata = header.pop("__metadata__", {})
        slots = {name: _slot(entry, 8 + length) for name, entry in header.items()}
        if not all(isinstance(value, str) for value in metadata.values()):
            raise SafetensorsError("its metadata are not texts")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise SafetensorsError(f"{path}: its header is damaged: {error}") from error
    at = 8 + length
    for name, slot in sorted(slots.items(), key=lambda item: (item[1].begin, item[1].end)):
        if slot.begin != at:
            raise SafetensorsError(f"{path}: {name} begins at byte {slot.begin} instead of {at}")
        at = slot.end
    if at != size:
        raise SafetensorsError(f"{path}: has {size} bytes, its header tells of {at}")
    return slots, metadata


def _no_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise SafetensorsError("a name stands there twice")
    return found


def _slot(entry: dict[str, Any], data_at: int) -> Slot:
    dtype, shape = TORCH_OF[entry["dtype"]], tuple(entry["shape"])
    begin, end = entry["data_offsets"]
    if any(type(number) is not int or number < 0 for number in (*shape, begin, end)):
        raise SafetensorsError("a size is no number")
    if end - begin != math.prod(shape) * ITEM_BYTES[dtype]:
        raise SafetensorsError(f"{end - begin} bytes for a tensor of shape {list(shape)}")
    return Slot(dtype, shape, data_at + begin, data_at + end)


def find_files(source: Path) -> list[Path]:
    """Return the safetensors files of a model: a file itself, or what a directory holds, by its index where it has one.

    Raises:
        SafetensorsError: there is none, or the index is damaged or leads outside.
        OSError: it cannot be read.
    """
    if not source.is_dir():
        return [source]
    index = source / INDEX_NAME
    if not index.exists():
        if (source / SINGLE_NAME).exists():
            return [source / SINGLE_NAME]
        raise SafetensorsError(f"{source}: has neither {SINGLE_NAME} nor {INDEX_NAME}")
    if index.stat().st_size > INDEX_BYTES_MAX:
        raise SafetensorsError(f"{index}: too large for an index")
    try:
        names = set(json.loads(index.read_bytes())["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise SafetensorsError(f"{index}: damaged: {error}") from error
    for name in names:
        if not isinstance(name, str) or name != os.path.basename(name) or name in {"", ".", ".."}:
            raise SafetensorsError(f"{index}: names {name!r}, which is no file beside it")
    return [source / name for name in sorted(names)]


FLOATS = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
_HALF_MAX = 65520.0  # from here on, rounding to float16 is infinite
_NAN_BF16 = b"\xc0\x7f"


def convert(data: bytes | bytearray, source: str, target: str) -> bytes | bytearray:
    """Return the numbers in another type.  Both are names in `FLOATS`, the data whole numbers of it."""
    if source == target:
        return data
    single = _to_single(data, source)
    match target:
        case "float32":
            return single
        case "bfloat16":
            return _single_to_bfloat16(single)
        case "float16":
            return _single_to_half(
                _as_array("d" if source == "float64" else "f", data if source == "float64" else single)
            )
        case _:
            return array.array("d", _as_array("f", single)).tobytes()


def _as_array(code: str, data: bytes | bytearray) -> array.array[float]:
    numbers: array.array[float] = array.array(code)
    numbers.frombytes(data)
    return numbers


def _to_single(data: bytes | bytearray, source: str) -> bytes | bytearray:
    match source:
        case "float32":
            return data
        case "bfloat16":
            single = bytearray(2 * len(data))
            memoryview(single).cast("H")[1::2] = memoryview(data).cast("H")
            return single
        case "float16":
            return array.array("f", struct.unpack(f"<{len(data) // 2}e", data)).tobytes()
        case _:
            return array.array("f", _as_array("d", data)).tobytes()


def _single_to_half(numbers: array.array[float]) -> bytes:
    try:
        return struct.pack(f"<{len(numbers)}e", *numbers)
    except OverflowError:  # some are too large: those become infinite, as everywhere else
        small = (
            number if not abs(number) >= _HALF_MAX else math.copysign(math.inf, number)  # a NaN is neither
            for number in numbers
        )
        return struct.pack(f"<{len(numbers)}e", *small)


def _single_to_bfloat16(data: bytes | bytearray) -> bytes:
    count = len(data) // 4
    lanes = int.from_bytes(data, "little")
    ones = _lanes(count)
    exponents = (lanes >> 23) & (ones * 0xFF)
    special = ((exponents + ones) >> 8) & ones  # 1 where the exponent is full: infinite, or not a number
    kept_odd = (lanes >> 16) & ones
    finite = lanes if not special else lanes & ~(special * 0xFFFFFFFF)
    rounded = (
        finite + ones * 0x7FFF + kept_odd
    )  # carries stay within a lane: a finite number rounds to infinity at most
    result = memoryview(rounded.to_bytes(4 * count + 4, "little")[: 4 * count]).cast("H")[1::2].tobytes()
    return _put_special(result, data, special, count) if special else result


def _put_special(result: bytes, data: bytes | bytearray, special: int, count: int) -> bytes:
    patched = bytearray(result)
    singles = memoryview(data).cast("I")
    marks = special.to_bytes(4 * count, "little")
    at = marks.find(1)
    while at >= 0:
        lane = at // 4
        infinite = not singles[lane] & 0x7FFFFF
        patched[2 * lane : 2 * lane + 2] = data[4 * lane + 2 : 4 * lane + 4] if infinite else _NAN_BF16
        at = marks.find(1, at + 4)
    return bytes(patched)


@functools.lru_cache(maxsize=4)
def _lanes(count: int) -> int:
    return int.from_bytes(b"\1\0\0\0" * count, "little")
