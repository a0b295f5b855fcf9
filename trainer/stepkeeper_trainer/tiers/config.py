"""Which tiers a run has: from arguments of the CheckpointManager, or from the variables that `stepkeeper run` sets."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import xxhash

from stepkeeper_trainer.environment import read_number
from stepkeeper_trainer.formats.plain import read_plain
from stepkeeper_trainer.tiers.tier import TierError

LOCAL_KEEP = 2
IDENTITY_BYTES_MAX = 64
NODE_PATTERN = "%N"  # in the local tier's path, as srun has it: the node's name
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

    def check(self) -> Tiers:
        """Return itself.

        Raises:
            TierError: what is wrong with which setting.
        """
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
        if self.peers and self.local is None:
            raise TierError("peer copies are of the local tier, and there is none: set the local tier too")
        return self

    @property
    def any(self) -> bool:
        """Whether there is a tier besides the run directory."""
        return self.local is not None or self.cold is not None

    def local_checkpoints(self, run_directory: Path, identity: str, node: str) -> Path | None:
        """Return the local tier's place on a node for the steps of one run: many runs may share a disk.

        A run directory that was removed and made anew is another run, by its `identity`.
        """
        if self.local is None:
            return None
        where = run_directory.resolve()
        name = f"{where.name}.{xxhash.xxh3_64_hexdigest(f'{where}/{identity}'.encode())[:12]}"
        return Path(os.path.expanduser(self.local.replace(NODE_PATTERN, node))) / name / "checkpoints"


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
    """Read what `stepkeeper run` tells the ranks; these are its settings' own variables.

    Raises:
        TierError: a value makes no sense.
    """
    return Tiers(
        local=environ.get("STEPKEEPER_LOCAL_TIER") or None,
        cold=environ.get("STEPKEEPER_COLD_TIER") or None,
        megabytes_per_s=_number(environ, "STEPKEEPER_COPY_RATE"),
        cold_zstd=_whole(environ, "STEPKEEPER_COLD_ZSTD"),
        local_keep=_whole(environ, "STEPKEEPER_LOCAL_KEEP") or LOCAL_KEEP,
        cold_keep=_whole(environ, "STEPKEEPER_COLD_KEEP"),
        peers=environ.get("STEPKEEPER_PEER_COPIES", "").lower() in {"1", "true", "yes", "on"},
    ).check()


def _number(environ: Mapping[str, str], name: str) -> float | None:
    return read_number(environ, name, error=TierError)


def _whole(environ: Mapping[str, str], name: str) -> int | None:
    number = _number(environ, name)
    if number is not None and not number.is_integer():
        raise TierError(f"{name}={environ[name]!r} is not a whole number: set it right, or unset it")
    return None if number is None else int(number)
