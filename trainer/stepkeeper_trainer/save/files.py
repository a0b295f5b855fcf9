"""What this rank writes, by file: how its share of the tensors is split, and where in the arena each file lies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from stepkeeper_trainer.errors import SaveError
from stepkeeper_trainer.formats.collecting import paused
from stepkeeper_trainer.save.report import Item, encode_items
from stepkeeper_trainer.save.writer import FilePlan, places_in_file

if TYPE_CHECKING:
    from collections.abc import Callable

    import msgspec
    from torch.distributed.checkpoint.metadata import MetadataIndex

    from stepkeeper_trainer.save.planner import Share
    from stepkeeper_trainer.save.staging import Staging


FILES_MAX = 4  # of a rank, written beside each other; more where they would be too large
FILE_BYTES_MIN = 64 * 1024 * 1024  # a share is split where each file still gets so much
FILE_BYTES_MAX = 4 * 1024 * 1024 * 1024  # about: what a copy to an object store sends again after it was interrupted


@dataclass(frozen=True, slots=True)
class ShareFiles:
    """The files of one rank's share, as they lie in the arena."""

    share: Share
    plans: tuple[FilePlan, ...]
    items: msgspec.Raw  # as reported


class FilePlanner:
    """Splits the share of one rank into files, and lays the arena out by them."""

    def __init__(self, rank: int, staging: Staging) -> None:
        """Begin with nothing laid out."""
        self._rank = rank
        self._staging = staging
        self._files: ShareFiles | None = None
        self._by_file = False  # the arena is laid out by the files of the share in force

    def forget(self) -> None:
        """Take note that the arena was laid out anew: by the state's order, and not by file."""
        self._files, self._by_file = None, False

    def is_of(self, share: Share) -> bool:
        """Whether this share is the one that is laid out."""
        return self._by_file and self._files is not None and self._files.share is share

    def lay_out(self, share: Share) -> None:
        """Lay the arena out so that each file is one stretch of whole pages; no save may use it meanwhile.

        Raises:
            SaveError: something of the share is not staged.
            OSError: there is not enough memory.
        """
        self._files = None
        with paused():
            self._staging.regroup(self._groups(share), share.replicas.names)
            self._files = self._divide(share)
        self._by_file = True

    def of(self, share: Share) -> ShareFiles:
        """Return the files of a share, as the arena is laid out now.

        Raises:
            SaveError: something of the share is not staged, since another rank's state has changed: the next save
                stages it.
        """
        if self._files is None or self._files.share is not share:
            self._by_file = False
            with paused():
                self._files = self._divide(share)
        return self._files

    def _groups(self, share: Share) -> list[list[str]]:
        """Return the tensors of each file of this rank, and then small ones that are only compared."""
        groups = split_evenly(list(share.names), self._staging.size_of)
        others = share.replicas.names - set(share.names)
        return [*groups, sorted(others - self._staging.large(others))] if others else groups

    def _divide(self, share: Share) -> ShareFiles:
        """Say what is written from where.  Raises SaveError."""
        layout = self._staging.layout
        assert layout is not None
        indices = {index.fqn: index for index in share.items}
        plans: list[FilePlan] = []
        items: list[Item] = []
        for number, names in enumerate(split_evenly(list(share.names), self._staging.size_of)):
            file = f"__{self._rank}_{number}.distcp"
            try:
                pieces = sorted((layout.pieces[name] for name in names), key=lambda piece: piece.start)
            except KeyError as error:
                self._staging.signature = None
                raise SaveError(f"{error.args[0]} fell to this rank, which has not staged it") from None
            plan = FilePlan(file, tuple(piece.extent for piece in pieces))
            plans.append(plan)
            places = zip(pieces, places_in_file(plan.extents), strict=True)
            items += [_item(indices[piece.name], file, start, length) for piece, (start, length) in places]
        return ShareFiles(share, tuple(plans), encode_items(tuple(items)))


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
