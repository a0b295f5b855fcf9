"""The bytes of tensors in the host's memory, and NumPy's arrays as tensors and back: without torch's bridge to NumPy.

That bridge (`tensor.numpy()`, `torch.from_numpy`) fails where NumPy is missing, or is of a version that this torch was
not built for.  A training script may need no NumPy; neither does the library.
"""

from __future__ import annotations

import ctypes
import importlib
import sys
from typing import Any

import torch

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


def is_array(value: Any) -> bool:
    """Whether it is a NumPy array of numbers that torch has a type for."""
    numpy = sys.modules.get("numpy")  # who has an array has imported it
    return (
        numpy is not None
        and type(value) is numpy.ndarray
        and value.dtype.kind in "biuf"
        and isinstance(getattr(torch, value.dtype.name, None), torch.dtype)
    )


def from_array(array: Any) -> torch.Tensor:
    """Return a NumPy array as a tensor; of the same memory where that is laid out as a tensor's."""
    dtype: torch.dtype = getattr(torch, array.dtype.name)
    if not array.size:
        return torch.empty(array.shape, dtype=dtype)
    if not (array.flags.c_contiguous and array.flags.writeable and array.dtype.isnative):
        array = array.astype(array.dtype.newbyteorder("="), order="C", copy=True)
    return torch.frombuffer(array, dtype=dtype).view(array.shape)


def to_array(tensor: torch.Tensor) -> Any:
    """Return a copy of a tensor as a NumPy array.

    Raises:
        ImportError: NumPy is not there.
    """
    numpy = importlib.import_module("numpy")
    dtype = str(tensor.dtype).removeprefix("torch.")
    return numpy.frombuffer(view_bytes(tensor.contiguous()), dtype=dtype).reshape(tensor.shape).copy()
