"""Which rank writes what: found out on rank 0, of what every rank says that it holds.

A tensor of a thousand ranks is a thousand pieces, and there are thousands of tensors.  But those of one shape are cut
alike, as the layers of a model are.  So a rank sends each piece without its name, and once.  Names that lie alike on
all ranks are one *pattern*, and torch's planner sees one name of each pattern.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import msgspec
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem

from stepkeeper_trainer.errors import SaveError
from stepkeeper_trainer.save.replicas import Replicas, hash_tensor
from stepkeeper_trainer.state.keys import TREE_PREFIX, Look, Private, divide, kind_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import torch

    from stepkeeper_trainer.save.replicas import Hash


_names = msgspec.json.Decoder(tuple[str, ...])
Holding = tuple[tuple[int, ...], tuple[int, ...]]  # of a key: the ranks that hold it, and the numbers of their pieces


@dataclass(frozen=True, slots=True)
class Piece:
    """What a rank holds under a name, but for the name."""

    kind: Any  # see `kind_of`
    item: WriteItem

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for equal pieces."""
        data = self.item.tensor_data
        assert data is not None, "tensors only"
        properties = data.properties.__getstate__()  # type: ignore[no-untyped-call]
        return (self.kind, self.item.type, self.item.index.offset, data.chunk.sizes, data.size, properties)


@dataclass(frozen=True, slots=True)
class Held:
    """What one rank holds, as it tells rank 0."""

    names: bytes  # JSON, and not keys: ranks with the same names send the same bytes, which are read once
    pieces: tuple[Piece, ...]  # each once
    numbers: array[int]  # of each name's piece
    contents: dict[int, bytes]  # hashes of values, by the place of the name
    private: Private

    @staticmethod
    def of(
        plan: SavePlan, tensors: Mapping[str, torch.Tensor], contents: Mapping[str, Hash | None], private: Private
    ) -> Held:
        """Describe a rank's plan; descriptions of parts are always compared by value, they are small.

        Raises:
            SaveError: it has something else than tensors.
        """
        names = {key: name for name, key in private.items()}
        kinds: dict[Any, Any] = {}
        known: dict[tuple[object, ...], int] = {}
        pieces: list[Piece] = []
        numbers = array("I")
        hashes: dict[int, bytes] = {}
        for place, item in enumerate(plan.items):
            fqn = item.index.fqn
            if item.tensor_data is None:
                raise SaveError(f"{fqn} is no tensor")
            kind = kind_of(tensors[fqn])
            piece = Piece(kinds.setdefault(kind, kind), item)
            number = known.setdefault(piece.key, len(pieces))
            if number == len(pieces):
                pieces.append(replace(piece, item=replace(item, index=MetadataIndex("", item.index.offset))))
            numbers.append(number)
            content = hash_tensor(tensors[fqn]) if TREE_PREFIX in fqn else contents.get(fqn)
            if content is not None:
                hashes[place] = content.value
        own = tuple(names.get(item.index.fqn, item.index.fqn) for item in plan.items)
        return Held(msgspec.json.encode(own), tuple(pieces), numbers, hashes, private)


@dataclass(frozen=True, slots=True)
class Part:
    """What one rank writes, and what it holds that others hold too, by places in the rank's own plan.

    Names of all of it, sent to each of a thousand ranks, would be gigabytes on rank 0.
    """

    places: array[int]
    chunks: array[int]  # which chunk of its tensor each is, in `.metadata`
    replicas: tuple[tuple[int, array[int]], ...]  # the number of the group of ranks, and places

    def items(self, plan: SavePlan) -> tuple[MetadataIndex, ...]:
        """Return what is written."""
        indices = [item.index for item in plan.items]
        return tuple(
            MetadataIndex(indices[place].fqn, indices[place].offset, chunk)
            for place, chunk in zip(self.places, self.chunks, strict=True)
        )

    def named_replicas(self, plan: SavePlan) -> Replicas:
        """Return what others hold too."""
        names = [item.index.fqn for item in plan.items]
        groups = ((group, tuple(names[place] for place in places)) for group, places in self.replicas)
        return Replicas(tuple(groups))


@dataclass(frozen=True, slots=True)
class Chunk:
    """A part of each tensor of a pattern: who holds it, and its number in the tensor."""

    holders: tuple[int, ...]
    bytes: int
    number: int


class World:
    """What all ranks hold, on rank 0."""

    def __init__(self, held: Sequence[Held]) -> None:
        self._held = held
        names = {each.names: _names.decode(each.names) for each in held}
        places = {key: {name: place for place, name in enumerate(own)} for key, own in names.items()}
        self._places: list[dict[str, int]] = [places[each.names] for each in held]  # of names, on each rank
        self.pieces: list[Piece] = []
        self._special = frozenset(name for each in held for name in each.private)
        self._names: dict[str, str] = {}  # of keys that are others
        self._holdings = self._find_holdings(names)
        self._patterns: dict[Holding, list[str]] = {}
        for key, holding in self._holdings.items():
            self._patterns.setdefault(holding, []).append(key)

    def _find_holdings(self, names: Mapping[bytes, Sequence[str]]) -> dict[str, Holding]:
        """Return who holds what, by key, in the order of the first rank that holds it."""
        numbers: dict[tuple[object, ...], int] = {}
        rows: dict[bytes, list[Iterable[int]]] = {}
        ranks: dict[bytes, list[int]] = {}
        for rank, own in enumerate(self._held):
            renumbered = []
            for piece in own.pieces:
                number = numbers.setdefault(piece.key, len(numbers))
                if number == len(self.pieces):
                    self.pieces.append(piece)
                renumbered.append(number)
            rows.setdefault(own.names, []).append(map(renumbered.__getitem__, own.numbers))
            ranks.setdefault(own.names, []).append(rank)
        parts: dict[str, list[Holding]] = {}
        for template, own_rows in rows.items():
            holders = tuple(ranks[template])
            for name, column in zip(names[template], zip(*own_rows, strict=True), strict=True):
                if name not in self._special:
                    parts.setdefault(name, []).append((holders, column))
                    continue
                for rank, number in zip(holders, column, strict=True):
                    key = self._held[rank].private.get(name, name)
                    self._names[key] = name
                    parts.setdefault(key, []).append(((rank,), (number,)))
        return {key: each[0] if len(each) == 1 else _joined(each) for key, each in parts.items()}

    def looks(self, names: Iterable[str]) -> list[dict[str, Look]]:
        """Return what each rank holds under some names."""
        found: list[dict[str, Look]] = []
        for own, places in zip(self._held, self._places, strict=True):
            seen = {}
            for name in names:
                place = places.get(name)
                if place is not None:
                    piece = own.pieces[own.numbers[place]]
                    seen[name] = Look(piece.kind, piece.item.index.offset, own.contents.get(place))
            found.append(seen)
        return found

    def unequal(self) -> list[str]:
        """Return the names that may need more keys, or fewer, than are in force: of all others nothing changes."""
        found = set(self._special)
        for (_, numbers), keys in self._patterns.items():
            if len({self.pieces[number].kind for number in set(numbers)}) > 1:
                found.update(self._names.get(key, key) for key in keys)
        return sorted(found | self._unequal_contents())

    def _unequal_contents(self) -> set[str]:
        hashed = sorted({name for name in self._hashed_names() if name not in self._special})
        first: dict[tuple[str, Any], bytes | None] = {}
        return {
            name
            for seen in self.looks(hashed)
            for name, look in seen.items()
            if first.setdefault((name, look.box), look.content) != look.content
        }

    def _hashed_names(self) -> Iterator[str]:
        known: dict[bytes, set[int]] = {}
        of: dict[bytes, dict[str, int]] = {}
        for own, places in zip(self._held, self._places, strict=True):
            known.setdefault(own.names, set()).update(own.contents)
            of[own.names] = places
        for template, hashed in known.items():
            yield from (name for name, place in of[template].items() if place in hashed)

    def private(self) -> tuple[list[Private], list[dict[str, Look]]]:
        """Return which rank saves what by which key, from now on; and the looks that this comes from."""
        seen = self.looks(self.unequal())
        return divide(seen, [each.private for each in self._held]), seen

    def share_out(self) -> tuple[list[Part], Metadata, tuple[tuple[str, ...], ...]]:
        """Give every chunk to one rank; return that, what torch notes of the whole, and the tensors of each group.

        A group are ranks that hold the same chunks.  What several hold, the one with the fewest bytes so far writes.

        Raises:
            ValueError, AssertionError: the plans contradict each other.
        """
        chunks, entries = self._plan_patterns()
        sizes = [0] * len(self._held)
        places, numbers = ([array("I") for _ in self._held] for _ in range(2))
        groups: dict[tuple[int, ...], list[str]] = {}
        for key, holding in self._holdings.items():
            name = self._names.get(key, key)
            for chunk in chunks[holding]:
                holders = chunk.holders
                rank = holders[0]
                if len(holders) > 1:
                    rank = min(holders, key=sizes.__getitem__)
                    groups.setdefault(holders, []).append(key)
                sizes[rank] += chunk.bytes
                places[rank].append(self._places[rank][name])
                numbers[rank].append(chunk.number)
        replicas = self._find_replicas(groups)
        parts = [Part(*each) for each in zip(places, numbers, replicas, strict=True)]
        metadata = Metadata(
            {key: entries[holding] for key, holding in self._holdings.items()},
            planner_data={key: (key,) for key in self._holdings},  # stock tools use both
        )
        return parts, metadata, tuple(tuple(keys) for keys in groups.values())

    def _plan_patterns(self) -> tuple[dict[Holding, list[Chunk]], dict[Holding, Any]]:
        """Have torch plan one name of each pattern, and judge whether its pieces are the whole tensor."""
        holders: dict[MetadataIndex, list[int]] = {}
        items: dict[MetadataIndex, WriteItem] = {}
        for (ranks, numbers), keys in self._patterns.items():
            for rank, number in zip(ranks, numbers, strict=True):
                item = self.pieces[number].item
                index = MetadataIndex(keys[0], item.index.offset)
                holders.setdefault(index, []).append(rank)
                items.setdefault(index, replace(item, index=index))
        plans: list[SavePlan] = [SavePlan([], planner_data={}) for _ in self._held]
        for index, item in items.items():
            plans[holders[index][0]].items.append(item)
        planned, metadata = DefaultSavePlanner().create_global_plan(plans)
        chunks: dict[str, list[Chunk]] = {}
        for plan in planned:
            for item in plan.items:
                assert item.index.index is not None, "torch numbers the chunks of a tensor"
                size = item.tensor_storage_size() or 1
                chunk = Chunk(tuple(holders[item.index]), size, item.index.index)
                chunks.setdefault(item.index.fqn, []).append(chunk)
        entries = metadata.state_dict_metadata
        return (
            {holding: chunks[keys[0]] for holding, keys in self._patterns.items()},
            # Names of a pattern share one of torch's records.  It is seven objects and more; Python's search for cycles
            # goes through those of all names again and again, in training too, and `.metadata` holds what it names.
            {holding: entries[keys[0]] for holding, keys in self._patterns.items()},
        )

    def _find_replicas(
        self, groups: Mapping[tuple[int, ...], Sequence[str]]
    ) -> list[tuple[tuple[int, array[int]], ...]]:
        """Return what each rank holds together with others."""
        found: list[list[tuple[int, array[int]]]] = [[] for _ in self._held]
        for number, (holders, keys) in enumerate(groups.items()):
            names = [self._names.get(key, key) for key in keys]
            known: dict[int, array[int]] = {}  # ranks with the same names have them at the same places
            for rank in holders:
                places = self._places[rank]
                own = known.get(id(places))
                if own is None:
                    own = known[id(places)] = array("I", map(places.__getitem__, names))
                found[rank].append((number, own))
        return [tuple(each) for each in found]


def _joined(parts: Iterable[Holding]) -> Holding:
    """Put together what several ranks hold of one key."""
    pairs = sorted(pair for ranks, numbers in parts for pair in zip(ranks, numbers, strict=True))
    return tuple(rank for rank, _ in pairs), tuple(number for _, number in pairs)
