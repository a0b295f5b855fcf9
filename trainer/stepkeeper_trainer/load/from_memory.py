"""Loading a snapshot from the nodes' memory, by all ranks together.

Each rank reads the files that its own node has.  Of a sharded training these hold all of its shards.  What the ranks
have in common was divided among them when it was saved; what a rank needs of other nodes' files is small then, and the
ranks that wrote it send it over the process group.  Every chunk is checked by the rank that reads it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepkeeper_trainer.errors import DamagedError
from stepkeeper_trainer.formats.stored import StepBytes, StoredError
from stepkeeper_trainer.load.reader import CheckedReader, parse_contents, read_description
from stepkeeper_trainer.load.worker import Layouts, fill, place
from stepkeeper_trainer.tiers.tier import writer_of

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import torch

    from stepkeeper_trainer.coordinate.groups import Group
    from stepkeeper_trainer.formats.manifest import Manifest
    from stepkeeper_trainer.formats.metadata import Contents
    from stepkeeper_trainer.load.worker import Limits

SENT_BYTES_MAX = 64 * 1024**2
"""Of a step: rank 0 holds it three times for a moment, and each rank once."""
Extent = tuple[str, int, int]  # file, first byte, length


class MemoryReader(CheckedReader):
    """A snapshot: this node's files, and what other ranks send.  All ranks call each method together."""

    def __init__(self, directory: Path, manifest: Manifest, contents: Contents, group: Group | None) -> None:
        """See `open`."""
        super().__init__(directory, manifest, contents)
        self._group = group
        self._here = {name for name in manifest.files if (directory / name).exists()}

    @staticmethod
    def open(directory: Path, manifest: Manifest, group: Group | None) -> MemoryReader:
        """Read on rank 0 what the snapshot holds, and tell all ranks.

        Args:
            directory: the snapshot on this node; each rank finds there the files that it wrote.
            manifest: of the snapshot.
            group: of all ranks, which are as many as wrote it; None for one alone.

        Raises:
            DamagedError: it is not what was saved.
        """
        found: bytes | str = ""
        if group is None or group.rank == 0:
            try:
                found = read_description(directory, manifest)
            except (DamagedError, OSError) as error:
                found = str(error)
        if group is not None:
            found = group.broadcast(found)
        if isinstance(found, str):
            raise DamagedError(found)
        return MemoryReader(directory, manifest, parse_contents(found, directory), group)

    def fill(self, tensors: dict[str, torch.Tensor], *, limits: Limits | None = None, turn: float = 0.0) -> int:
        """Fill `tensors` in place; return how many bytes were read here.

        Raises:
            DamagedError: some byte is not what the manifest says, or ranks would have to send too much.
        """
        problem, wanted = "", []
        try:
            wanted = [item for item in self.plan(tensors) if item.target.numel()]
        except DamagedError as error:
            problem = str(error)
        elsewhere = [item for item in wanted if item.file not in self._here]
        sent = self._exchange({(item.file, item.start, item.length) for item in elsewhere}, problem)
        here = [item for item in wanted if item.file in self._here]
        count = fill(self._directory, self._manifest, here, limits=limits, turn=turn)
        layouts = Layouts(self._directory)
        for item in elsewhere:
            archive = bytearray(sent[item.file, item.start, item.length])
            place(archive, item, layouts, self._directory / item.file)
        return count

    def _exchange(self, needed: set[Extent], problem: str) -> dict[Extent, bytes]:
        """Return what ranks need of other nodes' files.  Raises DamagedError on all ranks where one has a problem."""
        group = self._group
        if group is None:
            if problem:
                raise DamagedError(problem)
            return {}
        told = group.gather((problem, sorted(needed)))
        agreed: str | list[Extent] = group.broadcast(agree(told) if told is not None else None)
        if isinstance(agreed, str):
            raise DamagedError(agreed)
        own: dict[Extent, bytes] = {}
        try:
            with StepBytes(self._directory, self._manifest) as source:
                own = {extent: source.read(*extent) for extent in agreed if writer_of(extent[0]) == group.rank}
        except (StoredError, OSError) as error:
            problem = str(error)
        if not agreed:
            return own
        everyone: list[tuple[str, dict[Extent, bytes]]] = group.all_gather((problem, own))
        if problems := [each for each, _ in everyone if each]:
            raise DamagedError(problems[0])
        return {extent: data for _, parts in everyone for extent, data in parts.items()}


def agree(told: Sequence[tuple[str, list[Extent]]]) -> str | list[Extent]:
    """Return what is to be sent, or why the snapshot cannot be loaded from memory (rank 0).

    `told` is of each rank: its problem, and what it needs of other nodes' files.
    """
    if problems := [problem for problem, _ in told if problem]:
        return problems[0]
    wanted = sorted({extent for _, needed in told for extent in needed})
    size = sum(length for _, _, length in wanted)
    if size > SENT_BYTES_MAX:
        return (
            f"ranks need {size / 1024**2:,.0f} MiB of other nodes' files, "
            f"and send each other at most {SENT_BYTES_MAX // 1024**2} MiB"
        )
    return wanted
