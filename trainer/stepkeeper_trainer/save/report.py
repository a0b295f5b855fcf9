"""`rank-R.json`: what one rank wrote for a save, once that is durable.

The commit needs these files only, not the processes that wrote them: a rank that dies after its report
does not stop the commit.

Hundreds of ranks report into one directory of shared storage.  So a report costs one new file: rank 0 reads it as soon
as it is complete, and it is gone before the step directory gets its name.  Nobody reads it after a crash, so it is
neither synced nor renamed.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

import msgspec

from stepkeeper_trainer.errors import SaveError
from stepkeeper_trainer.formats.durable import write_new
from stepkeeper_trainer.formats.manifest import FileEntry
from stepkeeper_trainer.formats.plain import DecodeError, MismatchError, decode, read_plain
from stepkeeper_trainer.save.replicas import Digest

if TYPE_CHECKING:
    from pathlib import Path

    from torch.distributed.checkpoint.metadata import MetadataIndex


_PAUSE_S = (0.05, 0.5)  # between looks for reports: the first, and the longest
REPORT_BYTES_MAX = 256 * 1024 * 1024
_PAUSE_SHARE = 0.1  # of the time waited so far: a commit is no later than that by our looking too seldom
GivenUp = Callable[[Collection[int]], str | None]
"""Asked with the ranks that are waited for; a text says why they never will report."""


class Item(msgspec.Struct, frozen=True, array_like=True):
    """One tensor chunk, and where its bytes are."""

    name: str
    offsets: tuple[int, ...] | None
    index: int | None
    file: str
    start: int
    length: int

    @staticmethod
    def of(index: MetadataIndex, file: str, start: int, length: int) -> Item:
        """Return where the chunk that torch calls so lies."""
        offsets = None if index.offset is None else tuple(index.offset)
        return Item(index.fqn, offsets, index.index, file, start, length)


class RankReport(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank has made durable; `error` means that it could not."""

    rank: int
    save_id: str
    items: msgspec.Raw = msgspec.Raw(b"[]")  # of `encode_items`: mostly the same as at the last save
    files: dict[str, FileEntry] = {}
    replicas: tuple[Digest, ...] = ()
    error: str | None = None


_decoder = msgspec.json.Decoder(RankReport)
_items = msgspec.json.Decoder(tuple[Item, ...])


def encode_items(items: tuple[Item, ...]) -> msgspec.Raw:
    """Return the items as a report holds them."""
    return msgspec.Raw(msgspec.json.encode(items))


def decode_items(report: RankReport) -> tuple[Item, ...]:
    """Return the items of a report.  Raises SaveError."""
    try:
        return decode(_items, bytes(report.items))
    except DecodeError as error:
        raise SaveError(f"rank {report.rank}: its report holds no items: {error}") from error


def report_name(rank: int) -> str:
    """Return the file name of a rank's report."""
    return f"rank-{rank}.json"


def publish(directory: Path, report: RankReport) -> None:
    """Make the report of what this rank has synced visible.  Its last byte makes it complete.

    The names of this rank's files are no matter of the report: each file was synced after it was made, and rank 0
    syncs the directory once all files are there.

    Raises:
        OSError: the report is gone again, and its space is free for `publish_failure`.
    """
    write_new(directory / report_name(report.rank), msgspec.json.encode(report), mode=0o600, sync=False)


def publish_failure(directory: Path, report: RankReport) -> None:
    """Make a report visible that need not outlive anybody: the disk may be full.  Raises OSError."""
    temporary = directory / f".{report_name(report.rank)}.failed"
    temporary.write_bytes(msgspec.json.encode(report))
    os.rename(temporary, directory / report_name(report.rank))


def gather(
    directory: Path,
    *,
    save_id: str,
    world_size: int,
    limit_at: float,
    given_up: GivenUp,
) -> list[RankReport]:
    """Wait until every rank has reported.

    `given_up` is asked while waiting, with the ranks that have not reported.

    Raises:
        SaveError: a rank failed, or was not heard of in time.
        OSError: the directory cannot be read.
    """
    reports: dict[int, RankReport] = {}
    torn = ""  # the newest report that is there in part
    missing = {report_name(rank): rank for rank in range(world_size)}
    began_at = time.monotonic()
    while True:
        for name in sorted(missing.keys() & _names(directory)):  # one listing, however many ranks are missing
            try:
                report = _read(directory / name)
            except DecodeError as error:
                torn = f"; {name} is not a report: {error}"
                continue  # its rank writes it still, or has died of it
            rank = missing.pop(name)
            if report.error is not None or report.save_id != save_id:
                raise SaveError(f"rank {rank}: {report.error or 'reported another save'}")
            reports[rank] = report
        if not missing:
            return [reports[rank] for rank in range(world_size)]
        if (why := given_up(missing.values())) is not None:
            raise SaveError(why)
        if time.time() >= limit_at:
            raise SaveError(f"rank {min(missing.values())} (and perhaps others) did not report in time{torn}")
        pause_s = min(_PAUSE_S[1], max(_PAUSE_S[0], _PAUSE_SHARE * (time.monotonic() - began_at)))
        time.sleep(min(pause_s, max(0.0, limit_at - time.time())))


def _names(directory: Path) -> set[str]:
    with os.scandir(directory) as entries:
        return {entry.name for entry in entries}


def _read(path: Path) -> RankReport:
    """Return a report.

    Raises:
        DecodeError: it is not complete.
        SaveError: it is complete, and something else.
    """
    try:
        return decode(_decoder, read_plain(path, REPORT_BYTES_MAX, within=path.parent))
    except MismatchError as error:
        raise SaveError(f"{path}: not a report: {error}") from error
