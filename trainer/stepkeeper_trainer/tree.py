"""Python state as tensors and JSON: nothing in a step directory needs unpickling of code.

A tree of dicts, lists, numbers and tensors is split into named tensors and a JSON skeleton that says
where each belongs.  Floats keep every bit; tuples and keys that are no strings come back as they were.
"""

from __future__ import annotations

import base64
import json
from typing import Any

import torch

from stepkeeper_trainer.buffers import from_array, is_array, to_array, view_bytes
from stepkeeper_trainer.errors import DamagedError, ResumeError, StateError

PAD_BYTES = 4096  # and its doubles: a blob keeps its size while its content grows, so the save plan stays the same


def split(value: Any, name: str, tensors: dict[str, torch.Tensor]) -> Any:
    """Put the tensors of `value` into `tensors`, under names that begin with `name`; return the rest.

    >>> found: dict[str, torch.Tensor] = {}
    >>> split({"lr": 0.1, "betas": (0.9, 0.95)}, "group", found)
    {'lr': 0.1, 'betas': {'$tuple': [0.9, 0.95]}}

    Raises:
        StateError: something is neither a tensor nor JSON.
    """
    match value:
        case None | bool() | int() | float() | str():
            return value
        case torch.Tensor():
            tensors[name] = value.detach()
            return {"$tensor": name}
        case tuple():
            return {"$tuple": [split(item, f"{name}.{i}", tensors) for i, item in enumerate(value)]}
        case list():
            return [split(item, f"{name}.{i}", tensors) for i, item in enumerate(value)]
        case dict():
            if all(isinstance(key, str) and not key.startswith("$") for key in value):
                return {key: split(item, f"{name}.{key}", tensors) for key, item in value.items()}
            items = [[split(k, f"{name}.key", tensors), split(v, f"{name}.{k}", tensors)] for k, v in value.items()]
            return {"$items": items}
        case bytes():
            return {"$bytes": base64.b64encode(value).decode()}
    if is_array(value):
        tensors[name] = from_array(value)
        return {"$ndarray": name}
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:  # a NumPy number
        return split(value.item(), name, tensors)
    raise StateError(
        f"{name} is a {type(value).__name__}, which is neither a tensor nor JSON: "
        "leave it out of state_dict(), or turn it into numbers, text or tensors"
    )


def join(skeleton: Any, tensors: dict[str, torch.Tensor]) -> Any:
    """Undo `split`.

    Raises:
        ResumeError: an array of NumPy was saved, and NumPy is not there.
    """
    match skeleton:
        case {"$tensor": str(name)}:
            return tensors[name]
        case {"$ndarray": str(name)}:
            return _array(name, tensors[name])
        case {"$bytes": str(text)}:
            return base64.b64decode(text)
        case {"$tuple": list(items)}:
            return tuple(join(item, tensors) for item in items)
        case {"$items": list(items)}:
            return {join(k, tensors): join(v, tensors) for k, v in items}
        case dict():
            return {key: join(item, tensors) for key, item in skeleton.items()}
        case list():
            return [join(item, tensors) for item in skeleton]
    return skeleton


def _array(name: str, tensor: torch.Tensor) -> Any:
    try:
        return to_array(tensor)
    except ImportError as error:
        raise ResumeError(f"{name} was saved as a NumPy array, and NumPy is not installed: install it") from error


def to_blob(skeleton: Any) -> torch.Tensor:
    """Return JSON as a uint8 tensor, padded with spaces."""
    data = json.dumps(skeleton, separators=(",", ":")).encode()
    room = PAD_BYTES
    while room < len(data):
        room *= 2
    data += b" " * (room - len(data))
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def from_blob(blob: torch.Tensor, *, name: str) -> Any:
    """Read a tensor of `to_blob`.

    Raises:
        DamagedError: it is no JSON.
    """
    try:
        return json.loads(bytes(view_bytes(blob.contiguous())) or b"null")
    except ValueError as error:
        raise DamagedError(f"{name} in the checkpoint is not JSON: {error}") from error
