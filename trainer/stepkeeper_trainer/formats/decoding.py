"""Parsing bytes that anybody may have written: whatever is wrong with them is one kind of error."""

from __future__ import annotations

from typing import TypeVar

import msgspec

T = TypeVar("T")


class DecodeError(msgspec.MsgspecError):
    """The bytes are not what they should be: not JSON, not UTF-8, nested too deep, or of another shape."""


class MismatchError(DecodeError):
    """They are JSON, of another shape or type."""


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
