"""What the storage holds, and whether it can be trusted.  Pure."""

from __future__ import annotations

import msgspec

from stepkeeper.core.events.stamped import Stamped


class Skipped(msgspec.Struct, frozen=True, kw_only=True):
    """A step directory that was passed over, and why."""

    directory: str
    problem: str
    damaged: bool = False  # it was committed, and is not what it was


class CheckpointChosen(Stamped, frozen=True, kw_only=True, tag="checkpoint_chosen"):
    """The answer to `ChooseCheckpoint`: the newest verified step directory, or None on a fresh start."""

    directory: str | None
    step: int | None
    skipped: tuple[Skipped, ...] = ()
    bytes_read: int = 0  # what was found right before, and is unchanged, is not read again
    seconds: float = 0.0
    readers: tuple[str, ...] = ()  # nodes that read


class ChoiceFailed(Stamped, frozen=True, kw_only=True, tag="choice_failed"):
    """The step directories could not even be listed: the storage does not answer as it should."""

    error: str


class CheckpointVerified(Stamped, frozen=True, kw_only=True, tag="checkpoint_verified"):
    """The answer to `VerifyCheckpoint`: every byte was read and compared."""

    directory: str
    ok: bool
    problem: str = ""
    seconds: float = 0.0
    bytes_read: int = 0
    readers: tuple[str, ...] = ()  # nodes that read
    gone: bool = False  # it was removed meanwhile: that says nothing


class StorageTested(Stamped, frozen=True, kw_only=True, tag="storage_tested"):
    """The answer to `TestStorage`: whether bytes that were written came back."""

    ok: bool
    problem: str = ""  # what is wrong, and in which act
    untrue: bool = False  # it gave back other bytes than it was given
    thorough: bool = False
    bytes: int = 0
    write_s: float = 0.0  # written and durable
    read_s: float = 0.0
    from_disk: bool = False  # read past the page cache
