"""Python objects between ranks, over a gloo group of all ranks.

Torch's own `*_object` collectives turn the bytes that they receive into an object by way of a NumPy array, and fail
without NumPy ("Numpy is not available"): see `buffers`.  Objects are pickled, as torch does it.
"""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from stepkeeper_trainer.buffers import view_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence


def all_gather(value: Any, group: Any) -> list[Any]:
    """Return every rank's `value`, on every rank."""
    own = _packed(value)
    sizes = _sizes(own, group)
    received = [torch.empty(max(sizes), dtype=torch.uint8) for _ in sizes]
    dist.all_gather(received, _padded(own, max(sizes)), group=group)
    return [_unpacked(data[:size]) for data, size in zip(received, sizes, strict=True)]


def gather(value: Any, group: Any) -> list[Any] | None:
    """Return every rank's `value` on rank 0; None on the others."""
    own = _packed(value)
    sizes = _sizes(own, group)
    first = dist.get_rank(group) == 0
    received = [torch.empty(max(sizes), dtype=torch.uint8) for _ in sizes] if first else None
    dist.gather(_padded(own, max(sizes)), received, dst=0, group=group)
    if received is None:
        return None
    return [_unpacked(data[:size]) for data, size in zip(received, sizes, strict=True)]


def scatter(values: Sequence[Any] | None, group: Any) -> Any:
    """Return this rank's one of the `values` that rank 0 has, one a rank; the others give None."""
    packed = [_packed(value) for value in values] if values is not None else None
    size = torch.zeros(1, dtype=torch.int64)
    sizes = [torch.tensor([len(data)]) for data in packed] if packed is not None else None
    dist.scatter(size, sizes, src=0, group=group)
    largest = torch.tensor([max((len(data) for data in packed), default=0) if packed is not None else 0])
    dist.broadcast(largest, src=0, group=group)
    received = torch.empty(int(largest), dtype=torch.uint8)
    padded = [_padded(data, int(largest)) for data in packed] if packed is not None else None
    dist.scatter(received, padded, src=0, group=group)
    return _unpacked(received[: int(size)])


def broadcast(value: Any, group: Any) -> Any:
    """Return the `value` of rank 0, on every rank."""
    first = dist.get_rank(group) == 0
    data = _packed(value) if first else torch.empty(0, dtype=torch.uint8)
    size = torch.tensor([len(data)])
    dist.broadcast(size, src=0, group=group)
    if not first:
        data = torch.empty(int(size), dtype=torch.uint8)
    dist.broadcast(data, src=0, group=group)
    return value if first else _unpacked(data)


def _sizes(own: torch.Tensor, group: Any) -> list[int]:
    sizes = torch.zeros(dist.get_world_size(group), dtype=torch.int64)
    sizes[dist.get_rank(group)] = len(own)
    dist.all_reduce(sizes, group=group)
    return [int(size) for size in sizes.tolist()]


def _packed(value: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)


def _padded(data: torch.Tensor, size: int) -> torch.Tensor:
    if len(data) == size:
        return data
    padded = torch.zeros(size, dtype=torch.uint8)
    padded[: len(data)] = data
    return padded


def _unpacked(data: torch.Tensor) -> Any:
    return pickle.loads(view_bytes(data))  # noqa: S301  # of our own ranks
