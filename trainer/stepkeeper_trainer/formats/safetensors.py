"""The safetensors format: eight bytes of length, a JSON header, then the tensors' bytes without a gap.

And the layout in which model hubs keep large models: several such files and an index that names the file of
each tensor.  Needs no torch, and not the `safetensors` library, against which the tests compare.
"""

from __future__ import annotations

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
