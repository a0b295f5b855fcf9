"""Turning numbers of one floating-point type into another, block by block, without torch and NumPy.

Rounded to the nearest, ties to even, as torch does.  bfloat16 is done on whole blocks at once, as one large
integer: a float32 has its bfloat16 in its upper half.
"""

from __future__ import annotations

import array
import functools
import math
import struct

FLOATS = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
_HALF_MAX = 65520.0  # from here on, rounding to float16 is infinite
_NAN_BF16 = b"\xc0\x7f"


def convert(data: bytes | bytearray, source: str, target: str) -> bytes | bytearray:
    """Return the numbers in another type.  Both are names in `FLOATS`, the data whole numbers of it."""
    if source == target:
        return data
    single = _to_single(data, source)
    match target:
        case "float32":
            return single
        case "bfloat16":
            return _single_to_bfloat16(single)
        case "float16":
            return _single_to_half(
                _as_array("d" if source == "float64" else "f", data if source == "float64" else single)
            )
        case _:
            return array.array("d", _as_array("f", single)).tobytes()


def _as_array(code: str, data: bytes | bytearray) -> array.array[float]:
    numbers: array.array[float] = array.array(code)
    numbers.frombytes(data)
    return numbers


def _to_single(data: bytes | bytearray, source: str) -> bytes | bytearray:
    match source:
        case "float32":
            return data
        case "bfloat16":
            single = bytearray(2 * len(data))
            memoryview(single).cast("H")[1::2] = memoryview(data).cast("H")
            return single
        case "float16":
            return array.array("f", struct.unpack(f"<{len(data) // 2}e", data)).tobytes()
        case _:
            return array.array("f", _as_array("d", data)).tobytes()


def _single_to_half(numbers: array.array[float]) -> bytes:
    try:
        return struct.pack(f"<{len(numbers)}e", *numbers)
    except OverflowError:  # some are too large: those become infinite, as everywhere else
        small = (
            number if not abs(number) >= _HALF_MAX else math.copysign(math.inf, number)  # a NaN is neither
            for number in numbers
        )
        return struct.pack(f"<{len(numbers)}e", *small)


def _single_to_bfloat16(data: bytes | bytearray) -> bytes:
    count = len(data) // 4
    lanes = int.from_bytes(data, "little")
    ones = _lanes(count)
    exponents = (lanes >> 23) & (ones * 0xFF)
    special = ((exponents + ones) >> 8) & ones  # 1 where the exponent is full: infinite, or not a number
    kept_odd = (lanes >> 16) & ones
    finite = lanes if not special else lanes & ~(special * 0xFFFFFFFF)
    rounded = (
        finite + ones * 0x7FFF + kept_odd
    )  # carries stay within a lane: a finite number rounds to infinity at most
    result = memoryview(rounded.to_bytes(4 * count + 4, "little")[: 4 * count]).cast("H")[1::2].tobytes()
    return _put_special(result, data, special, count) if special else result


def _put_special(result: bytes, data: bytes | bytearray, special: int, count: int) -> bytes:
    patched = bytearray(result)
    singles = memoryview(data).cast("I")
    marks = special.to_bytes(4 * count, "little")
    at = marks.find(1)
    while at >= 0:
        lane = at // 4
        infinite = not singles[lane] & 0x7FFFFF
        patched[2 * lane : 2 * lane + 2] = data[4 * lane + 2 : 4 * lane + 4] if infinite else _NAN_BF16
        at = marks.find(1, at + 4)
    return bytes(patched)


@functools.lru_cache(maxsize=4)
def _lanes(count: int) -> int:
    return int.from_bytes(b"\1\0\0\0" * count, "little")
