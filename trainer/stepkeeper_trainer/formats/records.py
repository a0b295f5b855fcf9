"""Small files of the run directory that hold one record with a `format`."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from stepkeeper_trainer.formats.decoding import DecodeError, NewerFormatError, decode_format
from stepkeeper_trainer.formats.plain import read_plain

if TYPE_CHECKING:
    from pathlib import Path

    import msgspec

T = TypeVar("T")


def read_record(
    path: Path,
    decoder: msgspec.json.Decoder[T],
    *,
    newest: int,
    error: type[Exception],
    otherwise: str,
    remedy: str = "",
) -> T | None:
    """Return what a file holds; None where there is none.

    Args:
        path: of the file.
        decoder: of its record.
        newest: the newest format that can be read.
        error: raised for what cannot.
        otherwise: what a damaged file is, as in "not a lease".
        remedy: what to do about that.

    Raises:
        OSError: the file is there and cannot be read.
    """
    try:
        data = read_plain(path, within=path.parent)
    except FileNotFoundError:
        return None
    try:
        return decode_format(decoder, data, newest=newest)
    except NewerFormatError as why:
        raise error(f"{path}: {why}") from why
    except DecodeError as why:
        raise error(f"{path}: {otherwise}: {why}{remedy}") from why
