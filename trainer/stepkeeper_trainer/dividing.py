"""What this rank writes, by file: how its share of the tensors is split, and where in the arena each file lies.

Tensors that do not change lie together in files of their own, so that those can be linked (see `incremental`).
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stepkeeper_trainer.errors import SaveError
from stepkeeper_trainer.formats.collecting import paused
from stepkeeper_trainer.incremental import History
from stepkeeper_trainer.report import Item, encode_items
from stepkeeper_trainer.writer import Sheet, Written, extents

if TYPE_CHECKING:
    from collections.abc import Callable

    import msgspec
    from torch.distributed.checkpoint.metadata import MetadataIndex

    from stepkeeper_trainer.planner import Share
    from stepkeeper_trainer.staging import Piece, Staging

FILES_MAX = 4  # hot ones of a rank, written beside each other; more where they would be too large
FILE_BYTES_MIN = 64 * 1024 * 1024  # a share is split where each file still gets so much
FILE_BYTES_MAX = 4 * 1024 * 1024 * 1024  # about: what a copy to an object store sends again after it was interrupted
_COLD_FIRST = 100  # cold files are numbered from here


@dataclass(frozen=True, slots=True)
class Sheets:
    """The files of a share, as they lie in the arena."""

    share: Share
    sheets: tuple[Sheet, ...]
    shuffle: tuple[int, ...]  # where in the sheets each tensor of the share is, counted through
    items: msgspec.Raw  # as reported


class Division:
    """The files of one rank, from save to save."""

    def __init__(self, rank: int, staging: Staging) -> None:
        """Begin with nothing laid out."""
        self._rank = rank
        self._staging = staging
        self._sheets: Sheets | None = None
        self._by_file = False  # the arena is laid out by the files of the share in force
        self._history: History | None = None  # of the share in force
        self._cold_numbers: dict[tuple[int, ...], int] = {}

    def forget(self) -> None:
        """The arena was laid out anew: by the state's order, and not by file."""
        self._sheets, self._by_file = None, False

    def is_of(self, share: Share) -> bool:
        """Whether this share is the one that is divided now."""
        return self._sheets is not None and self._sheets.share is share

    def begin(self, share: Share) -> None:
        """Lay the arena out by file, for a share of which nothing is known yet.  Raises SaveError, OSError."""
        self._history = None
        self._lay_out(share)

    def of(self, share: Share) -> Sheets:
        """Return the files of a share, as the arena is laid out now.

        Raises:
            SaveError: something of the share is not staged, since another rank's state has changed: the next save
                stages it.
        """
        if self._sheets is None or self._sheets.share is not share:
            self._by_file = False
            with paused():
                self._sheets = self._divide(share)
            self._history = None
        return self._sheets

    def learn(self, share: Share, written: list[Written]) -> None:
        """Take note of what changes, and lay the arena out by it while nobody uses it.  Raises OSError."""
        assert self._sheets is not None
        crcs = list(itertools.chain.from_iterable(one.crcs for one in written))
        if self._history is None:
            self._history = History([self._staging.size_of(name) for name in share.names])
        if not self._history.observe([crcs[number] for number in self._sheets.shuffle]) and self._by_file:
            return
        self._lay_out(share)

    def _lay_out(self, share: Share) -> None:
        """Lay the arena out by file, so that each is one stretch of whole pages."""
        self._sheets = None
        with paused():
            self._staging.regroup(self._groups(share), share.replicas.names)
            self._sheets = self._divide(share)
        self._by_file = True

    def _groups(self, share: Share) -> list[list[str]]:
        """Return the tensors of each file of this rank, and then small ones that are only compared."""
        names = list(share.names)
        history = self._history
        hot = [names[number] for number in history.hot] if history is not None else names
        groups = split_evenly(hot, self._staging.size_of)
        if history is not None:
            groups += [[names[number] for number in group] for group in history.groups]
        own = set(names)
        others = share.replicas.names - own
        if others:
            groups.append(sorted(others - self._staging.large(others)))
        return groups

    def _divide(self, share: Share) -> Sheets:
        """Say what is written from where.  Raises SaveError."""
        layout = self._staging.layout
        assert layout is not None
        try:
            pieces = [layout.pieces[name] for name in share.names]
        except KeyError as error:
            self._staging.signature = None
            raise SaveError(f"{error.args[0]} fell to this rank, which has not staged it") from None
        place = {piece.name: number for number, piece in enumerate(pieces)}
        history = self._history
        cold = [tuple(group) for group in history.groups] if history is not None else []
        known = {number for group in cold for number in group}
        hot = [piece for number, piece in enumerate(pieces) if number not in known]
        files: list[tuple[str, list[Piece], bool]] = []
        for number, names in enumerate(split_evenly([piece.name for piece in hot], self._staging.size_of)):
            files.append((f"__{self._rank}_{number}.distcp", [pieces[place[name]] for name in names], False))
        for group in cold:
            number = self._cold_numbers.setdefault(group, _COLD_FIRST + len(self._cold_numbers))
            files.append((f"__{self._rank}_{number}.distcp", [pieces[n] for n in group], True))
        indices = {index.fqn: index for index in share.items}
        sheets: list[Sheet] = []
        items: list[Item] = []
        for file, own, is_cold in files:
            own.sort(key=lambda piece: piece.start)
            marks = tuple(piece.mark for piece in own)
            sheets.append(Sheet(file, marks, is_cold))
            lies = zip(own, extents(marks), strict=True)
            items += [_item(indices[piece.name], file, start, length) for piece, (start, length) in lies]
        lies_at = {piece.name: number for number, piece in enumerate(p for _, own, _ in files for p in own)}
        shuffle = tuple(lies_at[name] for name in share.names)
        return Sheets(share, tuple(sheets), shuffle, encode_items(tuple(items)))


def _item(index: MetadataIndex, file: str, start: int, length: int) -> Item:
    offsets = None if index.offset is None else tuple(index.offset)
    return Item(index.fqn, offsets, index.index, file, start, length)


def split_evenly(names: list[str], size_of: Callable[[str], int]) -> list[list[str]]:
    """Split into files of about one size, in order; one file where there is not much."""
    sizes = [size_of(name) for name in names]
    total = sum(sizes)
    count = max(1, min(FILES_MAX, total // FILE_BYTES_MIN), -(-total // FILE_BYTES_MAX))
    groups: list[list[str]] = []
    at = 0
    for name, size in zip(names, sizes, strict=True):
        if not groups or (len(groups) < count and at >= total * len(groups) // count):
            groups.append([])
        groups[-1].append(name)
        at += size
    return groups
