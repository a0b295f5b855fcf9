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
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex, StorageMeta

from stepkeeper_trainer.errors import SaveError
from stepkeeper_trainer.formats.plain import collection_paused
from stepkeeper_trainer.save.report import Item, decode_items, encode_items
from stepkeeper_trainer.state.keys import TREE_PREFIX
from stepkeeper_trainer.state.tree import from_blob, join

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import msgspec

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
    storage: dict[MetadataIndex, _StorageInfo] = {}
    places: dict[tuple[str, int, int], _StorageInfo] = {}  # equal values share one: `.metadata` holds it once
    written: set[tuple[str, tuple[int, ...] | None]] = set()
    entries, names = metadata.state_dict_metadata, metadata.planner_data
    for report in reports:
        for item in decode_items(report):
            if item.file == VALUES_NAME and item.name in entries:
                continue  # a tensor has that name already
            offset = None if item.offsets is None else torch.Size(item.offsets)
            place = (item.file, item.start, item.length)
            storage[MetadataIndex(item.name, offset, item.index)] = places.get(place) or places.setdefault(
                place, _StorageInfo(*place)
            )
            written.add((item.name, item.offsets))
    for name, entry in entries.items():
        if isinstance(entry, BytesStorageMetadata) and (name, None) not in written:
            raise SaveError(f"nobody wrote {name}")
        for chunk in getattr(entry, "chunks", []):
            if (name, chunk.offsets) not in written and (name, None) not in written:
                raise SaveError(f"nobody wrote {name} at {tuple(chunk.offsets)}")
    values = [index.fqn for index in storage if index.fqn not in entries]
    whole = replace(
        metadata,
        state_dict_metadata=entries | dict.fromkeys(values, BytesStorageMetadata()),
        planner_data=names | {name: (name,) for name in values} if names is not None else None,
        storage_data=storage,
        storage_meta=StorageMeta(save_id=_NO_SAVE_ID),
    )
    if _DCP_VERSION is not None:
        whole.version = _DCP_VERSION
    data = pickle.dumps(whole)
    if data.count(_NO_SAVE_ID.encode()) != 1:
        raise SaveError(f"a tensor's name contains {_NO_SAVE_ID}")
    return data
