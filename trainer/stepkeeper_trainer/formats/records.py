"""Small files of the run directory that hold one record with a `format`.

`outcome.json`: what the ranks say of how they ended; it counts more than any exit code.

`keeping.json`: by what rules the newest launch keeps its steps, and in which places.  The ranks alone know what their
script asks for (`CheckpointManager(retention=..., tiers=...)`).  A person who looks later finds it here, by
`stepkeeper checkpoints tiers` or `prune`.  Places of earlier launches stay listed: copies may be there.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Literal, TypeVar
from urllib.parse import urlsplit

import msgspec

from stepkeeper_trainer.formats.durable import write_atomically
from stepkeeper_trainer.formats.plain import DecodeError, NewerFormatError, decode, decode_format, read_plain

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path


T = TypeVar("T")
FORMAT = 1  # of each of these records


class RecordError(msgspec.MsgspecError, ValueError):
    """The file does not parse, or a newer Stepkeeper wrote it."""


@dataclass(frozen=True, slots=True)
class RecordFile(Generic[T]):
    """A file of the run directory."""

    name: str
    kind: type[T]
    otherwise: str  # what a damaged file is, as in "not a lease"
    remedy: str = ""  # what to do about that
    error: type[Exception] = RecordError

    def read(self, run_directory: Path) -> T | None:
        """Return its record; None where there is none.

        Raises:
            RecordError: it is damaged, or of a newer format.
            OSError: it is there and cannot be read.
        """
        path = run_directory / self.name
        try:
            data = read_plain(path, within=run_directory)
        except FileNotFoundError:
            return None
        try:
            decoder: msgspec.json.Decoder[T] = msgspec.json.Decoder(self.kind)
            return decode_format(decoder, data, newest=FORMAT)
        except NewerFormatError as why:
            raise self.error(f"{path}: {why}") from why
        except DecodeError as why:
            raise self.error(f"{path}: {self.otherwise}: {why}{self.remedy}") from why

    def write(self, run_directory: Path, record: T) -> None:
        """Write it durably.  Raises OSError."""
        write_atomically(run_directory / self.name, msgspec.json.encode(record), mode=0o644)


OUTCOME_NAME = "outcome.json"
EXIT_FINISHED = 0
EXIT_STOPPED = 75  # EX_TEMPFAIL: stopped on request, state saved


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """Rank 0 writes it as the last act of a launch that ended as intended."""

    format: int = FORMAT
    outcome: Literal["finished", "stopped"]
    step: int
    tokens: int
    save_id: str | None
    launch: str  # "ATTEMPT.LAUNCH": an older launch's word is not taken for this one's
    at: float  # Unix seconds


_outcome = RecordFile(OUTCOME_NAME, Outcome, "not an outcome")
read_outcome, write_outcome = _outcome.read, _outcome.write
TRAINED_NAME = "trained.json"


class Trained(msgspec.Struct, frozen=True, kw_only=True):
    """Rank 0 of another framework's training writes it at its last step: the script may go on, and fail."""

    format: int = FORMAT
    launch: str  # "ATTEMPT.LAUNCH"
    step: int
    at: float  # Unix seconds


_trained = RecordFile(TRAINED_NAME, Trained, "not the end of a training")
read_trained, write_trained = _trained.read, _trained.write
OWN_SAVES_NAME = "own-saves.json"


class OwnSaves(msgspec.Struct, frozen=True, kw_only=True):
    """How a loop of another framework calls its saves, as its first one in a launch has shown it."""

    format: int = FORMAT
    framework: str
    directory: str
    prefix: str = ""  # of a checkpoint's name, before the number of its step
    suffix: str = ""
    digits: int = 0  # of the number, with zeros before it
    named: bool = True  # the script names them; else the framework does
    counts_backwards: bool = False  # the number counts backward passes, not optimizer steps
    options: dict[str, bool | int | float | str | None] = {}  # further ones of the call


_own_saves = RecordFile(OWN_SAVES_NAME, OwnSaves, "not how a script saves")
read_own_saves, write_own_saves = _own_saves.read, _own_saves.write
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


_keeping = RecordFile(KEEPING_NAME, Keeping, "not a record of what is kept")
read_keeping = _keeping.read


def write_keeping(run_directory: Path, keeping: Keeping) -> None:
    """Record it durably; places of earlier launches stay.

    Raises:
        OSError: it was not written, or what was there cannot be read.
    """
    try:
        before = read_keeping(run_directory)
    except RecordError:  # torn, or newer: what this launch does is what counts now
        before = None
    own = [msgspec.structs.replace(place, where=without_secrets(place.where)) for place in keeping.places]
    places = _merge(own, before.places if before is not None else ())
    _keeping.write(run_directory, msgspec.structs.replace(keeping, places=places))


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


TRACKERS_NAME = "trackers.json"
MLFLOW_VARIABLE = "MLFLOW_RUN_ID"  # MLflow's own: `mlflow.start_run()` goes on in the run that it names
_ID = re.compile(r"[A-Za-z0-9_-]{1,128}")


class TrackerIds(msgspec.Struct, frozen=True, kw_only=True):
    """What trackers call this run."""

    mlflow_run_id: str | None = None


_tracker_decoder = msgspec.json.Decoder(TrackerIds)


def read_tracker_ids(run_directory: Path) -> TrackerIds:
    """Return what trackers call the run; nothing where the file is missing, damaged or not plain."""
    try:
        known = decode(_tracker_decoder, read_plain(run_directory / TRACKERS_NAME, within=run_directory))
    except (OSError, DecodeError):
        return TrackerIds()
    named = known.mlflow_run_id
    return known if named is None or _ID.fullmatch(named) else TrackerIds()


def write_tracker_ids(run_directory: Path, known: TrackerIds) -> None:
    """Record it durably.  Raises OSError."""
    write_atomically(run_directory / TRACKERS_NAME, msgspec.json.encode(known))
