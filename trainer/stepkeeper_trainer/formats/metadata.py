"""DCP's `.metadata` read as data: which tensors a step holds, and in which bytes of which file each piece lies.

It is a pickle.  Stock torch loads it with `pickle.load`, which runs whatever it names; here the few names that
DCP writes stand for inert records of our own, and any other name is refused.  Needs no torch.
"""

from __future__ import annotations

import io
import math
import os
import pickle
from dataclasses import dataclass
from itertools import pairwise, product
from typing import TYPE_CHECKING, Any

import msgspec

from stepkeeper_trainer.formats.items import OpcodeError, find_end
from stepkeeper_trainer.formats.plain import collection_paused, comes_to_an_end

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from typing_extensions import Self

METADATA_NAME = ".metadata"
METADATA_BYTES_MAX = 2 * 1024 * 1024 * 1024
PROBLEMS_MAX = 20  # a torn save can lack thousands of pieces
COUNT_MAX = 2**63 - 1  # what torch and a file system can count to: of numbers, and of bytes
DIMENSIONS_MAX = 64  # of a tensor, in torch
TRIED_S, TRIED_BYTES_PER_S = 5, 1_000_000  # of another user's: several times what a real one takes
TRIED_BYTES, TRIED_BYTES_A_BYTE = 512 * 1024 * 1024, 64
CORNERS_MAX = 2**22  # of a tensor's pieces, compared to tell whether they cover it
_ITEM_BYTES = {
    **dict.fromkeys(("float64", "double", "int64", "long", "complex64", "uint64"), 8),
    **dict.fromkeys(("float32", "float", "int32", "int", "complex32", "uint32"), 4),
    **dict.fromkeys(("float16", "half", "bfloat16", "int16", "short", "uint16"), 2),
    **dict.fromkeys(("uint8", "int8", "bool"), 1),
    "complex128": 16,
}  # others (float8 and narrower) count as one byte or less: nothing is checked for them


class MetadataError(ValueError):
    """`.metadata` is torn, of an unknown kind, or names code."""


class Piece(msgspec.Struct, frozen=True):
    """A box of a tensor, and where its bytes lie."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    extent: Extent | None  # None: `.metadata` does not say


class Extent(msgspec.Struct, frozen=True):
    """A range of bytes of a file of the step directory."""

    file: str
    start: int
    length: int
    transformed: bool  # compressed or the like: the length tells nothing of what is inside
    zstd: bool = False  # it is compressed so, and nothing else was done to it


class TensorEntry(msgspec.Struct, frozen=True):
    """One tensor of the whole job, in pieces."""

    dtype: str  # `torch.` left out
    size: tuple[int, ...]
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class Contents:
    """What `.metadata` says that a step directory holds."""

    tensors: dict[str, TensorEntry]
    objects: dict[str, Extent | None]  # pickled items
    unclaimed: tuple[Extent, ...]  # stored, and part of nothing


# What a pickle makes ----------------------------------------------------------------------------------------------


class _Sealed(type):
    """A class that no pickle can change: BUILD sets attributes on whatever it is given, classes included."""

    def __setattr__(cls, name: str, value: Any) -> None:
        raise TypeError(f"{cls.__name__}.{name} cannot be set")

    def __delattr__(cls, name: str) -> None:
        raise TypeError(f"{cls.__name__}.{name} cannot be deleted")


class _Record(metaclass=_Sealed):
    """Attributes as a pickle sets them; nothing else happens."""


class _Metadata(_Record):
    pass


class _Tensor(_Record):
    pass


class _Object(_Record):
    pass


class _Chunk(_Record):
    pass


class _Index(_Record):
    pass


class _Info(_Record):
    pass


class _Properties(_Record):
    __slots__ = ("state",)

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Dtype(_Record):
    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name


class _Ignored(_Record):
    """Whatever is of no use here: layouts, plans, paths."""

    def __new__(cls, *_arguments: Any) -> Self:
        return super().__new__(cls)

    def __setstate__(self, state: Any) -> None:
        pass


def _member(owner: object, _name: object) -> _Ignored:
    """Stand for the member of an enum; nothing is looked up."""
    if owner is not _Ignored:
        raise MetadataError("looks up a name in what is no enum of a checkpoint: it was not loaded")
    return _Ignored()


_CHECKPOINT = "torch.distributed.checkpoint"
_ALLOWED: dict[tuple[str, str], Callable[..., Any]] = {
    (f"{_CHECKPOINT}.metadata", "Metadata"): _Metadata,
    (f"{_CHECKPOINT}.metadata", "TensorStorageMetadata"): _Tensor,
    (f"{_CHECKPOINT}.metadata", "BytesStorageMetadata"): _Object,
    (f"{_CHECKPOINT}.metadata", "ChunkStorageMetadata"): _Chunk,
    (f"{_CHECKPOINT}.metadata", "TensorProperties"): _Properties,
    (f"{_CHECKPOINT}.metadata", "MetadataIndex"): _Index,
    (f"{_CHECKPOINT}.metadata", "_MEM_FORMAT_ENCODING"): _Ignored,
    (f"{_CHECKPOINT}.metadata", "StorageMeta"): _Ignored,
    (f"{_CHECKPOINT}.filesystem", "_StorageInfo"): _Info,
    (f"{_CHECKPOINT}.filesystem", "_StoragePrefix"): _Ignored,
    (f"{_CHECKPOINT}.planner", "SavePlan"): _Ignored,  # Megatron keeps all plans
    (f"{_CHECKPOINT}.planner", "WriteItem"): _Ignored,
    (f"{_CHECKPOINT}.planner", "WriteItemType"): _Ignored,
    (f"{_CHECKPOINT}.planner", "TensorWriteData"): _Ignored,
    ("torch", "Size"): tuple,
    ("torch.serialization", "_get_layout"): _Ignored,
    ("pathlib", "PosixPath"): _Ignored,
    ("pathlib", "PurePosixPath"): _Ignored,
    ("pathlib._local", "PosixPath"): _Ignored,  # Python 3.13's name of it
    ("collections", "OrderedDict"): dict,
    ("builtins", "getattr"): _member,  # how Python 3.11.0 to 3.11.3 writes the member of an enum
}


class _Restricted(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        found = _ALLOWED.get((module, name))
        if found is not None:
            return found
        if module == "torch" and name.isidentifier() and name.islower():
            return _Dtype(name)
        raise MetadataError(f"names {f'{module}.{name}'[:200]!r}, which no checkpoint needs: it was not loaded")


def parse_of(directory: Path, data: bytes) -> Contents:
    """Read the bytes of the `.metadata` of a step directory; of another user's, only what is known to come to an end.

    Raises:
        MetadataError: why it cannot be used.
        OSError: the directory is gone.
    """
    return parse_guarded(data) if os.stat(directory).st_uid != os.geteuid() else parse(data)


def parse_guarded(data: bytes) -> Contents:
    """Read the bytes of a `.metadata` of unknown origin, such as a download, only if that comes to an end.

    Raises:
        MetadataError: why it cannot be used.
        OSError: no process can be made to try it.
    """
    seconds, more = TRIED_S + len(data) // TRIED_BYTES_PER_S, TRIED_BYTES + TRIED_BYTES_A_BYTE * len(data)
    if not comes_to_an_end(lambda: parse(data), seconds=seconds, bytes_more=more):
        raise MetadataError(f"takes more than {seconds} s or {more} bytes to read: it was not loaded")
    return parse(data)


def parse(data: bytes) -> Contents:
    """Read the bytes of a `.metadata` without running anything of it.

    Raises:
        MetadataError: why it cannot be used.
    """
    try:
        with collection_paused():
            find_end(data)
            return _contents(_Restricted(io.BytesIO(data)).load())
    except MetadataError:
        raise
    except OpcodeError as error:
        raise MetadataError(f"{error}: it was not loaded") from error
    except MemoryError:
        raise
    except Exception as error:  # damaged bytes can raise anything
        raise MetadataError(f"torn or damaged: {type(error).__name__}: {str(error)[:200]}") from error


def _contents(root: Any) -> Contents:
    if type(root) is not _Metadata:
        raise MetadataError("is no DCP metadata")
    fields = vars(root)
    stored: dict[tuple[str, tuple[int, ...] | None], Extent] = {}
    for index, info in (fields.get("storage_data") or {}).items():
        key = vars(index)
        name, offset = key["fqn"], key.get("offset")
        if type(name) is not str:
            raise MetadataError("a tensor's name is no text")
        stored[name, None if offset is None else _box(offset)] = _extent(info)
    tensors: dict[str, TensorEntry] = {}
    objects: dict[str, Extent | None] = {}
    used: set[tuple[str, tuple[int, ...] | None]] = set()
    for name, entry in fields["state_dict_metadata"].items():
        if type(name) is not str:
            raise MetadataError("a tensor's name is no text")
        if type(entry) is _Tensor:
            tensors[name] = _tensor(name, vars(entry), stored, used)
        elif type(entry) is _Object:
            used.add((name, None))
            objects[name] = stored.get((name, None))
        else:
            raise MetadataError(f"{name[:200]!r} is neither a tensor nor an object")
    unclaimed = tuple(extent for key, extent in stored.items() if key not in used)
    return Contents(tensors, objects, unclaimed)


def _tensor(
    name: str,
    fields: dict[str, Any],
    stored: Mapping[tuple[str, tuple[int, ...] | None], Extent],
    used: set[tuple[str, tuple[int, ...] | None]],
) -> TensorEntry:
    pieces = []
    size = _box(fields["size"])
    if math.prod(size) > COUNT_MAX:
        raise MetadataError(f"{name[:200]!r} has more numbers than a tensor can have")
    for chunk in fields["chunks"]:
        box = vars(chunk)
        offsets, sizes = _box(box["offsets"]), _box(box["sizes"])
        if len(offsets) != len(size) or len(sizes) != len(size):
            raise MetadataError(f"{name[:200]!r} has a piece of another number of dimensions")
        key: tuple[str, tuple[int, ...] | None] = (name, offsets)
        if key not in stored and not any(offsets):
            key = (name, None)  # a tensor of one piece may be stored without its offsets
        used.add(key)
        pieces.append(Piece(offsets, sizes, stored.get(key)))
    state = fields["properties"].state
    dtype = state[0]
    if type(dtype) is not _Dtype:
        raise MetadataError(f"{name[:200]!r} has no type of numbers")
    return TensorEntry(dtype.name, size, tuple(pieces))


def _extent(info: Any) -> Extent:
    fields = vars(info)
    file, start, length = fields["relative_path"], fields["offset"], fields["length"]
    if type(file) is not str or type(start) is not int or type(length) is not int:
        raise MetadataError("an extent is not a name and two numbers")
    if max(abs(start), abs(length)) > COUNT_MAX:
        raise MetadataError(f"an extent of {file[:200]!r} is larger than a file can be")
    transforms = fields.get("transform_descriptors")
    return Extent(file, start, length, bool(transforms), zstd=transforms in _ZSTD)


_ZSTD = (["stream.zstd/1"], ("stream.zstd/1",))  # as torch's `ZStandard` names itself


def _box(value: Any) -> tuple[int, ...]:
    if type(value) is not tuple or len(value) > DIMENSIONS_MAX or not all(map(_is_count, value)):
        raise MetadataError("a size is not a list of numbers that a tensor can have")
    return value


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= COUNT_MAX


# Whether it is whole ----------------------------------------------------------------------------------------------


def check_coverage(contents: Contents, sizes: Mapping[str, int]) -> list[str]:
    """Say what is missing for every tensor to be read in full: nothing is the empty list.

    Args:
        contents: of `.metadata`.
        sizes: bytes of each file, by its name in the step directory.
    """
    problems = []
    for problem in _uncovered(contents, sizes):
        problems.append(problem)
        if len(problems) == PROBLEMS_MAX:
            problems.append("and more")
            break
    return problems


def _uncovered(contents: Contents, sizes: Mapping[str, int]) -> Iterator[str]:
    objects = {extent for extent in contents.objects.values() if extent is not None}  # equal values share their bytes
    extents = [*contents.unclaimed, *objects]
    for name, extent in contents.objects.items():
        if extent is None:
            yield f"{name}: stored nowhere"
    for name, tensor in contents.tensors.items():
        if problem := _hole(tensor):
            yield f"{name}: {problem}"
        item_bytes = _ITEM_BYTES.get(tensor.dtype, 0)
        for piece in tensor.pieces:
            extent = piece.extent
            if extent is None:
                yield f"{name}: its piece at {list(piece.offsets)} is stored nowhere"
                continue
            extents.append(extent)
            if not extent.transformed and extent.length < math.prod(piece.sizes) * item_bytes:
                yield f"{name}: its piece at {list(piece.offsets)} has too few bytes"
    yield from _misplaced(extents, sizes)


def _misplaced(extents: list[Extent], sizes: Mapping[str, int]) -> Iterator[str]:
    """Find extents that lie outside of their file, or in each other."""
    by_file: dict[str, list[tuple[int, int]]] = {}
    for extent in extents:
        by_file.setdefault(extent.file, []).append((extent.start, extent.start + extent.length))
    for file, ranges in by_file.items():
        size = sizes.get(file)
        if size is None:
            yield f"{file}: holds {len(ranges)} pieces and is not there"
            continue
        ranges.sort()
        if ranges[0][0] < 0 or any(end <= start for start, end in ranges):
            yield f"{file}: a piece has no place in it"
        elif max(end for _, end in ranges) > size:
            yield f"{file}: has {size} bytes, its pieces need {max(end for _, end in ranges)}"
        elif any(after[0] < before[1] for before, after in pairwise(ranges)):
            yield f"{file}: two pieces share bytes"


def _hole(tensor: TensorEntry) -> str | None:
    """Say whether the pieces of a tensor leave something out, or overlap."""
    pieces = tensor.pieces
    volume = math.prod(tensor.size)
    if len(pieces) == 1 and pieces[0].sizes == tensor.size and not any(pieces[0].offsets):
        return None
    for piece in pieces:
        if any(o + s > limit for o, s, limit in zip(piece.offsets, piece.sizes, tensor.size, strict=True)):
            return f"its piece at {list(piece.offsets)} sticks out of it"
    filled = sum(math.prod(piece.sizes) for piece in pieces)
    if filled != volume:
        return f"its pieces hold {filled} of its {volume} numbers"
    return _overlap(tensor) if volume else None


def _overlap(tensor: TensorEntry) -> str | None:
    """Say whether some pieces overlap, by their corners alone: n pieces cost n steps, however they lie.

    Each corner of a box counts 1 or -1, by the number of its upper ends.  Boxes fill a larger one, each number once,
    exactly if their corners cancel out but for those of that one.
    """
    cut = [d for d, limit in enumerate(tensor.size) if any(piece.sizes[d] != limit for piece in tensor.pieces)]
    boxes = [piece for piece in tensor.pieces if math.prod(piece.sizes)]
    if len(boxes) << len(cut) > CORNERS_MAX:
        return f"is cut into {len(boxes)} pieces along {len(cut)} dimensions: too many to tell whether they cover it"
    counts: dict[tuple[int, ...], int] = {}
    whole = Piece((0,) * len(tensor.size), tensor.size, None)
    for box, weight in [*((box, 1) for box in boxes), (whole, -1)]:
        ends = [((box.offsets[d], 1), (box.offsets[d] + box.sizes[d], -1)) for d in cut]
        for corner in product(*ends):
            at = tuple(place for place, _ in corner)
            sign = math.prod(each for _, each in corner)
            counts[at] = counts.get(at, 0) + weight * sign
    return "two of its pieces overlap" if any(counts.values()) else None
