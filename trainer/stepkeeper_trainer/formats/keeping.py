"""`keeping.json` of the run directory: by what rules the newest launch keeps its steps, and in which places.

The ranks alone know what their script asks for (`CheckpointManager(retention=..., tiers=...)`).  A person who looks
later finds it here, by `stepkeeper checkpoints tiers` or `prune`.  Places of earlier launches stay listed: copies may
be there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal
from urllib.parse import urlsplit

import msgspec

from stepkeeper_trainer.formats.durable import write_atomically
from stepkeeper_trainer.formats.records import read_record

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

FORMAT = 1
KEEPING_NAME = "keeping.json"
PLACES_MAX = 16  # the oldest are forgotten


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """A place besides the run directory that steps were kept in."""

    kind: Literal["local", "cold"]
    where: str  # a path (`%N` in it is the node), or the URL of an object store, without credentials
    launch: str  # "ATTEMPT.LAUNCH", the newest that used it
    at: float  # Unix seconds, of its start


class Keeping(msgspec.Struct, frozen=True, kw_only=True):
    """Rank 0 writes it when a launch has resumed."""

    format: int = FORMAT
    launch: str  # "ATTEMPT.LAUNCH"
    at: float  # Unix seconds
    retention: dict[str, int | float | str | bool | None] | None  # fields of a policy; None: no step is removed
    places: tuple[Place, ...] = ()  # newest first

    def now(self, kind: str) -> Place | None:
        """Return the place of a kind that the newest launch uses, else the last one that any did."""
        return next((place for place in self.places if place.kind == kind), None)


class KeepingError(msgspec.MsgspecError):
    """The file does not parse, or a newer Stepkeeper wrote it."""


_decoder = msgspec.json.Decoder(Keeping)


def read(run_directory: Path) -> Keeping | None:
    """Return what the newest launch recorded; None where none did.

    Raises:
        OSError: the file is there and cannot be read.
        KeepingError: it is no such record, or one of a newer format.
    """
    return read_record(
        run_directory / KEEPING_NAME,
        _decoder,
        newest=FORMAT,
        error=KeepingError,
        otherwise="not a record of what is kept",
    )


def write(run_directory: Path, keeping: Keeping) -> None:
    """Record it durably; places of earlier launches stay.

    Raises:
        OSError: it was not written, or what was there cannot be read.
    """
    try:
        before = read(run_directory)
    except KeepingError:  # torn, or newer: what this launch does is what counts now
        before = None
    own = [msgspec.structs.replace(place, where=without_secrets(place.where)) for place in keeping.places]
    places = _merge(own, before.places if before is not None else ())
    whole = msgspec.structs.replace(keeping, places=places)
    write_atomically(run_directory / KEEPING_NAME, msgspec.json.encode(whole), mode=0o644)


def without_secrets(where: str) -> str:
    """Return a place without what may be secret in a URL: user, password, query, fragment.

    >>> without_secrets("s3://me:secret@bucket/run?key=x")
    's3://bucket/run'
    >>> without_secrets("/disk/%N")
    '/disk/%N'
    """
    if "://" not in where:
        return where
    parts = urlsplit(where)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def _merge(own: Iterable[Place], before: Iterable[Place]) -> tuple[Place, ...]:
    known = {(place.kind, place.where): place for place in [*before, *own]}  # the newer one of a place counts
    return tuple(sorted(known.values(), key=lambda place: -place.at)[:PLACES_MAX])
