"""What a tier is, the words that all of them share, and which tiers a run has.

Those come from arguments of the CheckpointManager, or from the variables that `stepkeeper run` sets.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

import msgspec
import xxhash

from stepkeeper_trainer.environment import read_number
from stepkeeper_trainer.formats.manifest import FileEntry, Manifest, unseal
from stepkeeper_trainer.formats.plain import read_plain


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

        Directories of `despite` are damaged: they do not count as a copy that is there already.
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
    if not entry.lists_chunks:
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


LOCAL_KEEP = 2
SNAPSHOT_DIRECTORY = "/dev/shm"  # noqa: S108 - memory; what is there is looked at before it is used
IDENTITY_BYTES_MAX = 64
NODE_PATTERN = "%N"  # in the local tier's path, as srun has it: the node's name
SNAPSHOTS_NAME = "stepkeeper-"  # and the user's number: all snapshots of a user on a node are below it
_INTERFACE = re.compile(r"[^\s/:]{1,15}")
IDENTITY_NAME = ".tiers-id"  # of a run directory, below checkpoints/: what nodes' disks have belongs to it


class Tiers(msgspec.Struct, frozen=True, kw_only=True):
    """Where step directories are kept besides the run directory; without any, nothing is copied."""

    local: str | None = None  # a directory on each node's own disk, `%N` is the node: steps are written there first
    cold: str | None = None  # a directory, or the URL of an object store: steps are copied there last
    megabytes_per_s: float | None = None  # of the copies that one node makes; None: as fast as it goes
    cold_zstd: int | None = None  # level at which files in the cold tier are compressed; None: not
    local_keep: int = LOCAL_KEEP  # newest steps that stay on a node's disk
    cold_keep: int | None = None  # newest steps that stay in the cold tier; None: all
    peers: bool = False  # each node's files are also kept by the next node
    peer_interface: str | None = None  # the network interface that takes them; None: the way to the first node
    snapshot_every: str | None = None  # how often a step is kept in memory; None: never
    snapshot_directory: str = SNAPSHOT_DIRECTORY  # of each node, in memory

    def check(self) -> Tiers:
        """Return itself.  Raises TierError."""
        if self.local is not None and not os.path.isabs(os.path.expanduser(self.local)):
            raise TierError(f"local tier {self.local}: an absolute path is wanted: it is one on each node's own disk")
        if self.cold is not None:
            check_place(self.cold)
        rate = self.megabytes_per_s
        if rate is not None and not (math.isfinite(rate) and rate > 0):
            raise TierError(f"copy rate {rate}: more than 0 is wanted, in MB/s")
        for name, least, value in (
            ("cold_zstd", 1, self.cold_zstd),
            ("local_keep", 1, self.local_keep),
            ("cold_keep", 1, self.cold_keep),
        ):
            if value is not None and value < least:
                raise TierError(f"{name} {value}: at least {least} is wanted")
        self._check_peers()
        if not os.path.isabs(self.snapshot_directory):
            raise TierError(f"snapshot_dir {self.snapshot_directory}: an absolute path is wanted")
        return self

    def _check_peers(self) -> None:
        if self.peers and self.local is None and self.snapshot_every is None:
            raise TierError(
                "peer copies are of the local tier and of snapshots in memory, and there are none: set one of these too"
            )
        if self.peer_interface is not None:
            if not self.peers:
                raise TierError("peer_interface is for peer copies, and there are none: set these too")
            if not _INTERFACE.fullmatch(self.peer_interface):
                raise TierError(
                    f"peer_interface {self.peer_interface!r}: not the name of a network interface: `ip link` shows them"
                )

    @property
    def any(self) -> bool:
        """Whether there is a tier besides the run directory."""
        return self.has_places or self.snapshot_every is not None

    @property
    def has_places(self) -> bool:
        """Whether saves are written or copied to a place besides the run directory."""
        return self.local is not None or self.cold is not None

    def local_checkpoints(self, run_directory: Path, identity: str, node: str) -> Path | None:
        """Return the local tier's place on a node for the steps of one run: many runs may share a disk.

        A run directory that was removed and made anew is another run, by its `identity`.
        """
        if self.local is None:
            return None
        name = _name_of(run_directory, identity)
        return Path(os.path.expanduser(self.local.replace(NODE_PATTERN, node))) / name / "checkpoints"

    def snapshots_of(self, run_directory: Path, identity: str, node: str) -> Path:
        """Return the place in memory of a node for the snapshots of one run."""
        own = f"{_name_of(run_directory, identity)}.{node}"  # nodes of a test cluster share one memory
        return Path(self.snapshot_directory, f"{SNAPSHOTS_NAME}{os.geteuid()}", own, "checkpoints")


def _name_of(run_directory: Path, identity: str) -> str:
    """Return what the places of a run on nodes are called by."""
    where = run_directory.resolve()
    return f"{where.name}.{xxhash.xxh3_64_hexdigest(f'{where}/{identity}'.encode())[:12]}"


def read_identity(checkpoints: Path) -> str:
    """Return the identity of a run directory, which is in the names of its places on nodes' disks.

    Raises:
        FileNotFoundError: it has none yet.
        OSError: it cannot be read.
        TierError: it is none.
    """
    path = checkpoints / IDENTITY_NAME
    identity = read_plain(path, IDENTITY_BYTES_MAX, within=checkpoints).strip()
    if not (identity.isalnum() and identity.isascii()):
        raise TierError(f"{path}: not the identity of a run directory: remove it, and copies on nodes' disks are left")
    return identity.decode()


def check_place(where: str) -> None:
    """Refuse a URL that carries a secret: it would stand in logs.  Raises TierError without naming it."""
    parts = urlsplit(where)
    if parts.scheme and (parts.password is not None or "@" in parts.netloc or parts.query or parts.fragment):
        raise TierError(
            f"{parts.scheme}://{parts.hostname or ''}…: a URL of a tier holds no credentials and no options: "
            "give them by the store's own environment variables (such as AWS_ACCESS_KEY_ID) or files"
        )
    if not parts.scheme and not os.path.isabs(os.path.expanduser(where)):
        raise TierError(f"cold tier {where}: an absolute path or a URL is wanted")


def from_environment(environ: Mapping[str, str] = os.environ) -> Tiers:
    """Read what `stepkeeper run` tells the ranks; these are its settings' own variables.  Raises TierError."""
    return Tiers(
        local=environ.get("STEPKEEPER_LOCAL_TIER") or None,
        cold=environ.get("STEPKEEPER_COLD_TIER") or None,
        megabytes_per_s=read_number(environ, "STEPKEEPER_COPY_RATE", error=TierError),
        local_keep=_whole(environ, "STEPKEEPER_LOCAL_KEEP") or LOCAL_KEEP,
        cold_keep=_whole(environ, "STEPKEEPER_COLD_KEEP"),
        peers=environ.get("STEPKEEPER_PEER_COPIES", "").lower() in {"1", "true", "yes", "on"},
        peer_interface=environ.get("STEPKEEPER_PEER_INTERFACE") or None,
        snapshot_every=environ.get("STEPKEEPER_SNAPSHOT_EVERY") or None,
        snapshot_directory=environ.get("STEPKEEPER_SNAPSHOT_DIR") or SNAPSHOT_DIRECTORY,
    ).check()


def _whole(environ: Mapping[str, str], name: str) -> int | None:
    number = read_number(environ, name, error=TierError)
    if number is not None and not number.is_integer():
        raise TierError(f"{name}={environ[name]!r} is not a whole number: set it right, or unset it")
    return None if number is None else int(number)
