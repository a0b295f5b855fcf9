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
"""Of a step, by all ranks together: each rank holds it once, and a few times for a moment."""
EXTENTS_MAX = 2_000_000
"""That all ranks together may ask for: rank 0 hears them all, at 200 bytes each."""
ROUND_BYTES = 1024**2
"""That a rank sends at once: who collects it from 32 ranks has room for the longest from each."""
Extent = tuple[str, int, int]  # file, first byte, length


class MemoryReader(CheckedReader):
    """A snapshot: this node's files, and what other ranks send.  All ranks call `begin` and `fill` together."""

    def __init__(
        self, directory: Path, manifest: Manifest, here: frozenset[str], contents: Contents, group: Group | None
    ) -> None:
        """See `begin`."""
        super().__init__(directory, manifest, contents)
        self._here, self._group = here, group

    @staticmethod
    def begin(directory: Path, manifest: Manifest, here: frozenset[str], group: Group | None) -> MemoryReader:
        """Read on rank 0 what the snapshot holds, and tell all ranks.

        Args:
            directory: the snapshot on this node.
            manifest: of the snapshot.
            here: the files that this node has; those that a rank wrote are on its node.
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
        return MemoryReader(directory, manifest, here, parse_contents(found, directory), group)

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
        size = sum(length for _, _, length in needed)
        counts = group.all_gather((problem, len(needed), size))
        problem = why_not(counts)
        if problem:
            raise DamagedError(problem)
        if not any(count for _, count, _ in counts):
            return {}
        told = group.gather(sorted(needed))
        agreed: list[Extent] | str = group.broadcast(agree(told) if told is not None else None)
        if isinstance(agreed, str):
            raise DamagedError(agreed)
        return self._send(agreed, group)

    def _send(self, agreed: list[Extent], group: Group) -> dict[Extent, bytes]:
        """Send what this rank wrote of some ranges, and return all of them, on all ranks.  Raises DamagedError."""
        problem, own = "", b""
        try:
            with StepBytes(self._directory, self._manifest) as source:
                own = b"".join(source.read(*extent) for extent in agreed if writer_of(extent[0]) == group.rank)
        except (StoredError, OSError) as error:
            problem = str(error)
        if problems := [each for each in group.all_gather(problem) if each]:
            raise DamagedError(problems[0])
        sizes: dict[int, int] = {}
        for file, _, length in agreed:
            sizes[writer_of(file)] = sizes.get(writer_of(file), 0) + length
        sent: list[list[bytes]] = [[] for _ in range(group.size)]
        for begin in range(0, max(sizes.values()), ROUND_BYTES):
            for rank, piece in enumerate(group.all_gather(own[begin : begin + ROUND_BYTES])):
                sent[rank].append(piece)
        streams = [b"".join(pieces) for pieces in sent]
        at = [0] * group.size
        found = {}
        for extent in agreed:
            rank, length = writer_of(extent[0]), extent[2]
            found[extent] = streams[rank][at[rank] : at[rank] + length]
            at[rank] += length
        return found


def why_not(counts: Sequence[tuple[str, int, int]]) -> str:
    """Say why the snapshot cannot be loaded from memory; nothing where it can.

    `counts` are of each rank: its problem, how many ranges it needs of other nodes' files, and their bytes.
    """
    if problems := [problem for problem, _, _ in counts if problem]:
        return problems[0]
    if (most := max(size for _, _, size in counts)) > SENT_BYTES_MAX:
        return _too_much(most)
    if (ranges := sum(count for _, count, _ in counts)) > EXTENTS_MAX:
        return f"ranks need {ranges:,} pieces of other nodes' files, and ask each other for at most {EXTENTS_MAX:,}"
    return ""


def agree(told: Sequence[Sequence[Extent]]) -> list[Extent] | str:
    """Return what is to be sent of what ranks need of other nodes' files, or why that is too much (rank 0)."""
    wanted = sorted({extent for needed in told for extent in needed})
    size = sum(length for _, _, length in wanted)
    return wanted if size <= SENT_BYTES_MAX else _too_much(size)


def _too_much(size: int) -> str:
    return (
        f"ranks need {size / 1024**2:,.0f} MiB of other nodes' files, "
        f"and send each other at most {SENT_BYTES_MAX // 1024**2} MiB"
    )
