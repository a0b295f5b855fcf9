"""Parsing bytes that anybody may have written: whatever is wrong with them is one kind of error.

Millions of records are made without Python looking for cycles among them, which takes most of the time otherwise.
"""

from __future__ import annotations

import gc
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterator


T = TypeVar("T")


class DecodeError(msgspec.MsgspecError):
    """The bytes are not what they should be: not JSON, not UTF-8, nested too deep, or of another shape."""


class MismatchError(DecodeError):
    """They are JSON, of another shape or type."""


class NewerFormatError(DecodeError):
    """A newer Stepkeeper wrote them."""


def decode(decoder: msgspec.json.Decoder[T], data: bytes) -> T:
    """Parse JSON.

    Raises:
        MismatchError: it is JSON of another shape.
        DecodeError: it is not JSON at all.
    """
    try:
        return decoder.decode(data)
    except msgspec.ValidationError as error:
        raise MismatchError(str(error)) from error
    except UnicodeDecodeError as error:  # msgspec's own errors do not include it
        raise DecodeError(f"not UTF-8: {error.reason} (byte {error.start} of a text)") from error
    except RecursionError as error:
        raise DecodeError("nested too deep") from error
    except msgspec.MsgspecError as error:
        raise DecodeError(str(error)) from error


class _Format(msgspec.Struct, frozen=True):
    format: int = 1


_format: msgspec.json.Decoder[_Format] = msgspec.json.Decoder(_Format)


def decode_format(decoder: msgspec.json.Decoder[T], data: bytes, *, newest: int) -> T:
    """Parse JSON that has a `format`, which is looked at first: the other fields may mean something else there.

    Raises:
        NewerFormatError: its format is newer than `newest`.
        DecodeError: it is damaged.
    """
    check_format(data, newest=newest)
    return decode(decoder, data)


def check_format(data: bytes, *, newest: int) -> None:
    """Look at the `format` of JSON, and at nothing else.

    Raises:
        NewerFormatError: it is newer than `newest`.
        DecodeError: it is damaged.
    """
    found = decode(_format, data).format
    if found > newest:
        raise NewerFormatError(f"format {found} is newer than this Stepkeeper reads ({newest}): upgrade Stepkeeper")
    if found < 1:
        raise MismatchError(f"format {found}: there is none")


@contextmanager
def collection_paused() -> Iterator[None]:
    """Pause the collection of cycles; what has no cycle is freed as ever."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
