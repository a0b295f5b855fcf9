"""What stock `torch.distributed.checkpoint` reads of a step directory besides the tensors: `.metadata`, and values.

`.metadata` is made from the plan and what all ranks have written: the same bytes as last time, mostly.

Numbers, lists and text of the state have the names there that stock `load` asks for.  Stepkeeper keeps them as JSON in
tensors, and reads nothing else.  Stock DCP wants a pickled value for each: a learning rate is one under
`optimizer.param_groups.0.lr`; with `flatten_optimizer_state_dict` each parameter has one.  Rank 0 writes each value
once into a small file; `.metadata` has the names, and many of them point at the same bytes.
"""

from __future__ import annotations

import io
import pickle
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import xxhash
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)

from stepkeeper_trainer.errors import SaveError
from stepkeeper_trainer.formats.plain import collection_paused
from stepkeeper_trainer.save.report import Item, decode_items, encode_items
from stepkeeper_trainer.state.keys import TREE_PREFIX
from stepkeeper_trainer.state.tree import from_blob, join

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    import msgspec
    from torch.distributed.checkpoint.metadata import Metadata

    from stepkeeper_trainer.save.planner import Share
    from stepkeeper_trainer.save.report import RankReport

VALUES_NAME = "values.bin"
_UNSAFE = frozenset(  # a load would need more than plain data
    {"$subclass", "$ndarray", "$bytesio", "$set", "$frozenset", "$deque", "$complex", "$bytearray", "factory"}
)


class Values(NamedTuple):
    """The bytes of the file, and where in it each name's value lies."""

    data: bytes
    items: msgspec.Raw


class Encoder:
    """Of all saves of a launch, on rank 0: names and places are mostly those of the save before."""

    def __init__(self) -> None:
        self._made_from: list[tuple[tuple[int, int], _Name | _Option]] | None = None
        self._items: msgspec.Raw | None = None

    def encode(self, trees: Mapping[str, Any]) -> Values:
        """Return the values of the parts' skeletons, by part."""
        places: dict[bytes, tuple[int, int]] = {}  # of what `torch.save` makes of a value: begin and length
        data = bytearray()
        names: list[tuple[tuple[int, int], _Name | _Option]] = []
        for part, skeleton in trees.items():
            for name, value in _leaves(part, skeleton):
                archive = _saved(value)
                if archive not in places:
                    places[archive] = (len(data), len(archive))
                    data += archive
                names.append((places[archive], name))
        if self._items is None or self._made_from != names:
            with collection_paused():
                self._items = encode_items(tuple(_items(names)))
            self._made_from = names
        return Values(bytes(data), self._items)


def skeletons(tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Return what a state holds besides tensors, by part: `TrainingState.collect` made it for this very save."""
    return {
        name.removeprefix(TREE_PREFIX): from_blob(tensor, name=name)
        for name, tensor in tensors.items()
        if name.startswith(TREE_PREFIX)
    }


def _saved(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _items(names: list[tuple[tuple[int, int], _Name | _Option]]) -> Iterator[Item]:
    known: set[str] = set()
    for (start, length), each in names:
        for name in each.names():
            if name not in known:  # a parameter may be called as a group is: "0"
                known.add(name)
                yield Item(name, None, None, VALUES_NAME, start, length)


@dataclass(frozen=True, slots=True)
class _Name:
    """One name."""

    name: str

    def names(self) -> Iterator[str]:
        yield self.name


@dataclass(frozen=True, slots=True)
class _Option:
    """An option of a parameter group: the group's, and, flattened, each parameter's own."""

    prefix: str
    number: int
    key: str
    parameters: list[str]

    def names(self) -> Iterator[str]:
        yield f"{self.prefix}.{self.number}.{self.key}"
        for parameter in self.parameters:
            yield f"{self.prefix}.{parameter}.{self.key}"


def _leaves(part: str, skeleton: Any) -> Iterator[tuple[_Name | _Option, Any]]:
    """Yield what DCP would write as a value, with its names."""
    match skeleton:
        case {"columns": dict(), "rest": dict(rest), "param_groups": list(groups)}:  # of an optimizer
            for number, group in enumerate(groups):
                members = group["params"]
                for key, value in group.items():
                    if key == "params":
                        yield _Name(f"{part}.param_groups.{number}.params"), members
                    elif _is_plain(value):
                        yield _Option(f"{part}.param_groups", number, key, members), join(value, {}, named=False)
            yield from _flatten(f"{part}.state", rest)
        case {"names": str(), "extra": dict(extra)}:  # of a module
            for name, value in extra.items():
                yield from _flatten(name, value)
        case _:
            yield from _flatten(part, skeleton)


def _flatten(name: str, skeleton: Any) -> Iterator[tuple[_Name, Any]]:
    """Yield the values of a tree as DCP flattens one; tensors are stored as such already."""
    match skeleton:
        case {"$items": list(items)}:
            for key, value in items:
                if _is_plain(key):
                    yield from _flatten(f"{name}.{join(key, {}, named=False)}", value)
        case dict() if not any(key.startswith("$") for key in skeleton):
            for key, value in skeleton.items():
                yield from _flatten(f"{name}.{key}", value)
        case list() if not _is_terminal(skeleton):
            for number, value in enumerate(skeleton):
                yield from _flatten(f"{name}.{number}", value)
        case _ if _is_plain(skeleton):
            yield _Name(name), join(skeleton, {}, named=False)


def _is_terminal(skeleton: list[Any]) -> bool:
    """Whether DCP takes a list as one value: it goes into one that holds dicts or tensors."""
    for value in skeleton:
        match value:
            case {"$items": _} | {"$tensor": _} | {"$subclass": _}:
                return False
            case dict() if not any(key.startswith("$") for key in value):
                return False
            case list() if not _is_terminal(value):
                return False
    return True


def _is_plain(skeleton: Any) -> bool:
    """Whether a value is plain data, without tensors."""
    match skeleton:
        case dict():
            return _UNSAFE.isdisjoint(skeleton) and "$tensor" not in skeleton and all(map(_is_plain, skeleton.values()))
        case list():
            return all(map(_is_plain, skeleton))
    return True


_NO_SAVE_ID = "0" * 32  # in its place, until a save is known
_DCP_VERSION: str | None = getattr(filesystem, "CURRENT_DCP_VERSION", None)  # of the format; an older torch names none


class Description:
    """Pickled once for a layout; only the save's name differs from save to save."""

    def __init__(self) -> None:
        self._made_from: tuple[object, ...] | None = None
        self._data = b""

    def of(self, save_id: str, share: Share, reports: list[RankReport]) -> bytes:
        """Return the bytes of `.metadata`.

        Raises:
            SaveError: what was written is not what was planned.
        """
        made_from = (share, *(xxhash.xxh3_128_digest(bytes(report.items)) for report in reports))
        if self._made_from is None or self._made_from[0] is not share or self._made_from != made_from:
            with collection_paused():
                self._data = _encode(share, reports)
            self._made_from = made_from
        return self._data.replace(_NO_SAVE_ID.encode(), save_id.encode())


def _encode(share: Share, reports: list[RankReport]) -> bytes:
    metadata = share.metadata
    assert metadata is not None, "rank 0 knows the whole"
    entries, names = metadata.state_dict_metadata, metadata.planner_data
    files = {name: None for report in reports for name in report.files}
    pieces = _Pieces(entries, files)
    storage: dict[MetadataIndex, _StorageInfo] = {}  # of all that is no piece of a tensor, in a file of a rank
    places: dict[tuple[str, int, int], _StorageInfo] = {}  # equal values share one: `.metadata` holds it once
    for report in reports:
        for item in pieces.take(decode_items(report)):
            if item.file == VALUES_NAME and item.name in entries:
                continue  # a tensor has that name already
            offset = None if item.offsets is None else torch.Size(item.offsets)
            place = (item.file, item.start, item.length)
            storage[MetadataIndex(item.name, offset, item.index)] = places.setdefault(place, _StorageInfo(*place))
    whole = {index.fqn for index in storage if index.offset is None}
    for name, entry in entries.items():
        if isinstance(entry, BytesStorageMetadata) and name not in whole:
            raise SaveError(f"nobody wrote {name}")
        missing = pieces.missing(name)
        if missing is not None and name not in whole:
            raise SaveError(f"nobody wrote {name} at {tuple(missing)}")
    values = [index.fqn for index in storage if index.fqn not in entries]
    said = replace(
        metadata,
        state_dict_metadata=entries | dict.fromkeys(values, BytesStorageMetadata()),
        planner_data=names | {name: (name,) for name in values} if names is not None else None,
        storage_data=storage,
        storage_meta=StorageMeta(save_id=_NO_SAVE_ID),
    )
    if _DCP_VERSION is not None:
        said.version = _DCP_VERSION
    data = pieces.pickled(said)
    if data.count(_NO_SAVE_ID.encode()) != 1:
        raise SaveError(f"a tensor's name contains {_NO_SAVE_ID}")
    return data


class _Numbers(dict[int, bytes]):
    """The opcode of each number: a few thousand of them come again and again."""

    def __missing__(self, number: int) -> bytes:
        if number < _FOUR_BYTES:
            code = pickle.BININT + number.to_bytes(4, "little")
        else:
            code = pickle.LONG1 + b"\x08" + number.to_bytes(8, "little")
        self[number] = code
        return code


_FOUR_BYTES = 2**31
_NEW = pickle.EMPTY_TUPLE + pickle.NEWOBJ + pickle.EMPTY_DICT + pickle.MARK  # of a class, and its attributes
_BUILT = pickle.SETITEMS + pickle.BUILD


class _Pieces:
    """Where pieces of tensors lie, as the opcodes of a pickle: a thousand ranks have millions, too many for objects.

    Names, offsets and files come first in the pickle, for its memo.  The entries come last, and go into `storage_data`,
    which is there by then.  Whatever reads pickles reads this one.
    """

    def __init__(self, entries: Mapping[str, Any], files: Iterable[str]) -> None:
        self._stream = io.BytesIO()
        self._pickler = pickle.Pickler(self._stream, 4)
        # by the offsets of each kind of division, the number of the chunk
        divisions = {id(entry): entry for entry in entries.values() if isinstance(entry, TensorStorageMetadata)}
        numbers: dict[int, dict[tuple[int, ...], int]] = {
            key: {chunk.offsets: n for n, chunk in enumerate(e.chunks)} for key, e in divisions.items()
        }
        self._chunks = {name: numbers[id(entry)] for name, entry in entries.items() if id(entry) in numbers}
        self._seen = {name: bytearray(len(chunks)) for name, chunks in self._chunks.items()}
        attributes = ["fqn", "offset", "index", "relative_path", "length"]
        texts = dict.fromkeys([*attributes, *self._chunks, *files])
        sizes = dict.fromkeys(offsets for chunks in numbers.values() for offsets in chunks)
        self._pickler.dump([MetadataIndex, _StorageInfo, *texts, *sizes])
        self._begin = self._stream.tell()
        self._memo = self._pickler.memo.copy()  # id of an object to its number, and it
        self._texts = {text: self._get(text) for text in texts}
        self._offsets = {tuple(offsets): self._get(offsets) for offsets in sizes}
        get = self._texts
        self._key = self._get(MetadataIndex) + _NEW + get["fqn"]
        self._value = _BUILT + self._get(_StorageInfo) + _NEW + get["relative_path"]
        self._numbers = _Numbers()
        self._codes: list[bytes] = []

    def _get(self, known: object) -> bytes:
        number: int = self._memo[id(known)][0]
        return pickle.BINGET + bytes([number]) if number < 256 else pickle.LONG_BINGET + number.to_bytes(4, "little")  # noqa: PLR2004

    def take(self, items: Iterable[Item]) -> Iterator[Item]:
        """Take in the pieces of tensors; yield what is something else."""
        chunks, seen, texts, offsets, numbers = self._chunks, self._seen, self._texts, self._offsets, self._numbers
        key, value = self._key, self._value
        offset, index, length = texts["offset"], texts["index"], texts["length"]
        codes = [pickle.MARK]
        for item in items:
            file = texts.get(item.file)
            number = chunks.get(item.name, {}).get(item.offsets) if item.offsets is not None else None
            if item.offsets is None or number is None or file is None:
                yield item
                continue
            seen[item.name][number] = 1
            codes.append(
                b"%b%b%b%b%b%b%b%b%b%b%b%b%b"
                % (
                    key, texts[item.name], offset, offsets[item.offsets],
                    index, pickle.NONE if item.index is None else numbers[item.index],
                    value, file, offset, numbers[item.start], length, numbers[item.length], _BUILT,
                )
            )  # fmt: skip
        codes.append(pickle.SETITEMS)
        self._codes.append(b"".join(codes))

    def missing(self, name: str) -> tuple[int, ...] | None:
        """Return the offsets of a piece of a tensor that was not taken in, if there is one."""
        number = self._seen[name].find(0) if name in self._seen else -1
        return None if number < 0 else next(o for o, n in self._chunks[name].items() if n == number)

    def pickled(self, metadata: Metadata) -> bytes:
        """Return a pickle of what torch notes of a checkpoint, with the pieces."""
        self._pickler.dump(metadata)
        self._memo = self._pickler.memo.copy()
        data = self._stream.getvalue()
        # each of the two pickles ends with STOP; in its place comes what goes on
        first, second = data[: self._begin - 1], data[self._begin + 2 : -1]  # without PROTO
        storage = pickle.MARK + self._get(metadata.storage_data)
        return b"".join([first, pickle.POP, second, storage, *self._codes, pickle.POP_MARK, pickle.STOP])
