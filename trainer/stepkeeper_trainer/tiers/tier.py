"""What a tier is, and the words that all of them share."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Protocol

import xxhash

from stepkeeper_trainer.formats.manifest import FileEntry, Manifest, unseal


class TierError(Exception):
    """A tier does not answer, has no room, or lacks something; what is there is untouched."""


class DamagedCopyError(TierError):
    """Bytes of a tier are not what the manifest says."""


@dataclass(frozen=True, slots=True)
class Held:
    """A committed step of a tier."""

    directory: str  # its name
    manifest: Manifest
    raw: bytes  # the very bytes of its manifest: a copy has the same

    @staticmethod
    def read(directory: str, raw: bytes, *, source: str) -> Held:
        """Parse a manifest.  Raises ManifestError."""
        return Held(directory, unseal(raw, source=source), raw)


class Staging(Protocol):
    """A step on its way into a tier.  Nobody takes it for a step before `commit`."""

    def done(self, name: str, entry: FileEntry) -> bool:
        """Whether a file is there in full: nothing is left to write."""
        ...

    def present(self, name: str, entry: FileEntry) -> int:
        """Return how many chunks of a file that is not done, from its first, are there already and right."""
        ...

    def write(self, name: str, entry: FileEntry, first: int, chunks: Iterator[bytes]) -> None:
        """Write a file from chunk `first` on, and make it durable.  Raises TierError or OSError."""
        ...

    def missing(self) -> list[str]:
        """Return the files that are not there yet in full."""
        ...

    def commit(self) -> str:
        """Make it a step of the tier, and return its directory's name.  Again is harmless.

        Raises:
            TierError: files are missing.
            DamagedCopyError: what was written reads back otherwise.
            OSError: the disk refuses.
        """
        ...


class Tier(Protocol):
    """A place of step directories."""

    @property
    def name(self) -> str:
        """For people: a path or a URL."""
        ...

    def steps(self) -> list[Held]:
        """Return the committed steps of the current lineage, newest first.  Raises TierError or OSError."""
        ...

    def problems(self, held: Held, *, deep: bool) -> list[str]:
        """Say what is wrong with a step; without `deep`, by a look at names and sizes."""
        ...

    def chunks(self, held: Held, name: str, entry: FileEntry, first: int) -> Iterator[bytes]:
        """Yield the chunks of a file from number `first` on, unchecked.  Raises TierError or OSError."""
        ...

    def has_file(self, held: Held, name: str, entry: FileEntry) -> bool:
        """Whether a file of a step is here: a node's own disk has those of its own ranks only."""
        ...

    def staging(self, held: Held, *, despite: Collection[str] = ()) -> Staging:
        """Begin to take in a step, or go on where an earlier try ended.

        Args:
            held: the step.
            despite: directories of this tier that are damaged: they do not count as a copy that is there already.
        """
        ...


def is_right(data: bytes | memoryview, entry: FileEntry, index: int) -> bool:
    """Whether these are the bytes of a chunk."""
    return index < len(entry.chunks) and xxhash.xxh3_128_hexdigest(data) == entry.chunks[index]


def check_chunk(data: bytes | memoryview, entry: FileEntry, index: int, *, where: str) -> None:
    """Compare a chunk with the manifest.  Raises DamagedCopyError."""
    if not is_right(data, entry, index):
        raise DamagedCopyError(f"{where}: bytes of chunk {index} (from byte {index * entry.chunk_bytes}) are wrong")


def check_entry(entry: FileEntry, *, where: str) -> None:
    """Refuse a file whose chunks the manifest does not list.  Raises DamagedCopyError."""
    if entry.bytes < 0 or entry.chunk_bytes <= 0 or len(entry.chunks) != -(-entry.bytes // entry.chunk_bytes):
        raise DamagedCopyError(f"{where}: the manifest does not list its chunks")
