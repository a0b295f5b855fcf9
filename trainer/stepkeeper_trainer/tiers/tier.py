"""What a tier is, and the words that all of them share."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
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


class Receiving(Protocol):
    """Something that files of a step are copied into."""

    def done(self, name: str, entry: FileEntry) -> bool:
        """Whether a file is there in full: nothing is left to write."""
        ...

    def present(self, name: str, entry: FileEntry) -> int:
        """Return how many chunks of a file that is not done, from its first, are there already and right."""
        ...

    def write(self, name: str, entry: FileEntry, first: int, chunks: Iterator[bytes]) -> None:
        """Write a file from chunk `first` on, and make it durable.  Raises TierError or OSError."""
        ...


class Staging(Receiving, Protocol):
    """A step on its way into a tier.  Nobody takes it for a step before `commit`."""

    def missing(self) -> list[str]:
        """Return the files of all ranks that are not there yet in full: a look at each, for who commits."""
        ...

    def check(self, name: str, entry: FileEntry, should_stop: Callable[[], bool]) -> None:
        """Read back a file that was written; one that reads back otherwise is removed, to be written again.

        Raises:
            DamagedCopyError: its bytes are not those that were sent.
            TierError: the tier does not answer, or it was asked to stop.
        """
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

    def remove(self, held: Held) -> None:
        """Remove a step, so that it is none at once.  Raises TierError or OSError."""
        ...

    def sweep(self, steps: Sequence[Held]) -> list[str]:
        """Remove what is left of steps that were given up or removed in part; return the names.

        `steps` are all that are committed here, newest first; what is newer than those may be on its way.

        Raises:
            TierError, OSError: the tier does not answer.
        """
        ...

    def staging(self, held: Held, *, despite: Collection[str] = ()) -> Staging:
        """Begin to take in a step, or go on where an earlier try ended.

        Args:
            held: the step.
            despite: directories of this tier that are damaged: they do not count as a copy that is there already.
        """
        ...


def writer_of(name: str) -> int:
    """Return the rank that wrote a file of a step; rank 0 wrote what names none.

    >>> writer_of("__12_0.distcp"), writer_of(".metadata")
    (12, 0)
    """
    digits = name.removeprefix("__").partition("_")[0]
    return int(digits) if name.startswith("__") and digits.isdigit() else 0


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


def check_file(tier: Tier, held: Held, name: str, entry: FileEntry, should_stop: Callable[[], bool]) -> None:
    """Read every byte of a file and compare it with the manifest.

    Raises:
        DamagedCopyError: it is not what the manifest says.
        TierError: the tier does not answer, or `should_stop` said so.
    """
    where = f"{tier.name}/{held.directory}/{name}"
    index = 0
    for index, chunk in enumerate(tier.chunks(held, name, entry, 0), 1):
        if should_stop():
            raise TierError(f"{where}: reading was stopped")
        check_chunk(chunk, entry, index - 1, where=where)
    if index != len(entry.chunks):
        raise DamagedCopyError(f"{where}: ends after {index} of {len(entry.chunks)} chunks")
