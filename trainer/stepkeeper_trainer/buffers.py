"""The bytes of tensors in the host's memory, NumPy's arrays and numbers, and CRC-32: without torch's bridge to NumPy.

That bridge (`tensor.numpy()`, `torch.from_numpy`) fails where NumPy is missing, or is of a version that this torch was
not built for.  A training script may need no NumPy; neither does the library.

CRC-32 is what zip archives have, by ISA-L where that is installed (`pip install isal`, five to eight times faster),
else by zlib.  It is most of what a save computes.
"""

from __future__ import annotations

import ctypes
import importlib
import struct
import sys
import zlib
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable


_READ_ONLY = 0x100  # PyBUF_READ
_view_memory = ctypes.pythonapi.PyMemoryView_FromMemory
_view_memory.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)
_view_memory.restype = ctypes.py_object


def view_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor in the host's memory, without a copy: the caller keeps the tensor."""
    assert tensor.is_contiguous(), "the bytes of a tensor with gaps are not its content"
    assert tensor.device.type == "cpu", "the host does not read a device's memory"
    count = tensor.numel() * tensor.element_size()
    if not count:
        return memoryview(b"")
    view: memoryview = _view_memory(tensor.data_ptr(), count, _READ_ONLY)
    return view


_NUMBERS = ("float16", "float32", "float64", *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)))


def is_array(value: Any) -> bool:
    """Whether it is a NumPy array of numbers that torch has a type for."""
    numpy = sys.modules.get("numpy")  # who has an array has imported it
    return (
        numpy is not None
        and type(value) is numpy.ndarray
        and value.dtype.kind in "biuf"
        and isinstance(getattr(torch, value.dtype.name, None), torch.dtype)
    )


def is_number(value: Any) -> bool:
    """Whether it is a number of NumPy that Python's own numbers hold to the last bit."""
    numpy = sys.modules.get("numpy")
    return (
        numpy is not None
        and isinstance(value, numpy.number | numpy.bool_)
        and value.dtype.name in ("bool", "complex64", "complex128", *_NUMBERS)
    )


def to_number(dtype: str, value: Any) -> Any:
    """Return a number of NumPy.  Raises ImportError."""
    return importlib.import_module("numpy").dtype(dtype).type(value)


def from_array(array: Any) -> torch.Tensor:
    """Return a NumPy array as a tensor; of the same memory where that is laid out as a tensor's."""
    dtype: torch.dtype = getattr(torch, array.dtype.name)
    if not array.size:
        return torch.empty(array.shape, dtype=dtype)
    if not (array.flags.c_contiguous and array.flags.writeable and array.dtype.isnative):
        array = array.astype(array.dtype.newbyteorder("="), order="C", copy=True)
    return torch.frombuffer(array, dtype=dtype).view(array.shape)


def to_array(tensor: torch.Tensor) -> Any:
    """Return a copy of a tensor as a NumPy array.  Raises ImportError."""
    numpy = importlib.import_module("numpy")
    dtype = str(tensor.dtype).removeprefix("torch.")
    return numpy.frombuffer(view_bytes(tensor.contiguous()), dtype=dtype).reshape(tensor.shape).copy()


_CRC = struct.Struct("<I")
_HELD_BYTES = 5 * 1024  # up to which the interpreter is held
_SMALL_BYTES = 64 * 1024


def _find_crc32() -> Callable[[Any, int], int]:
    try:
        found: Callable[[Any, int], int] = importlib.import_module("isal.isal_zlib").crc32
    except ImportError:
        return zlib.crc32
    return found if found(b"123456789", 0) == zlib.crc32(b"123456789") else zlib.crc32


_crc32 = _find_crc32()


def crc32(data: memoryview, before: int = 0) -> int:
    """Return the CRC-32 of bytes that follow some whose CRC-32 is `before`.

    Of more than 5 KiB both libraries let the interpreter go, and then wait to get it back, up to a switch interval
    (5 ms) if training is busy in Python. For a small tensor that would be a thousand times the work.
    """
    if not _HELD_BYTES < len(data) <= _SMALL_BYTES:
        return _crc32(data, before)
    for at in range(0, len(data), _HELD_BYTES):
        before = _crc32(data[at : at + _HELD_BYTES], before)
    return before


def put_crc(buffer: memoryview, first: int, second: int, crc: int) -> None:
    """Write a tensor's CRC-32 to the two places of its archive where it belongs."""
    _CRC.pack_into(buffer, first, crc)
    _CRC.pack_into(buffer, second, crc)
