"""Process groups: those of the library itself, objects sent over them, and the start of torch.distributed.

Connections end when the node at their other end is gone.  The kernel closes what a dead process had open.  A node
without power, or without a network, closes nothing, and a rank that waits for its message waits for good.  `probe` has
our kernel ask for an answer from each peer's kernel, which also answers for a process that stands still.  A connection
that stays silent for `LOST_AFTER_S` is closed, and the rank that waits on it gets an error.

Torch's own `*_object` collectives turn the bytes that they receive into an object by way of a NumPy array, and fail
without NumPy ("Numpy is not available"): see `buffers`.  Objects are pickled here too, as torch does it.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import resource
import socket
import threading
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from stepkeeper_trainer.buffers import view_bytes
from stepkeeper_trainer.environment import Place, find_place
from stepkeeper_trainer.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


IDLE_S = 20  # without a word, then the other end is asked
ASK_EVERY_S = 8
QUESTIONS = 5
LOST_AFTER_S = IDLE_S + QUESTIONS * ASK_EVERY_S
"""Silence of a peer's kernel until its connections are closed; a switch that restarts is back by then."""

_libc = ctypes.CDLL(None, use_errno=True)
_lock = threading.Lock()
_ours: dict[int, str] = {}  # descriptor to what it was: a number may be another's by now


@contextmanager
def noted() -> Iterator[None]:
    """Take note of the connections that are made within: those that `probe` is about."""
    before = _sockets()
    yield
    made = {number: name for number, name in _sockets().items() if before.get(number) != name}
    with _lock:
        _ours.update(made)


def probe() -> int:
    """Have the kernel look after the connections that were noted and are still open; return how many these are."""
    now = _sockets()
    with _lock:
        for number in [number for number, name in _ours.items() if now.get(number) != name]:
            del _ours[number]
        return sum(_probe(number) for number in _ours)


def _probe(number: int) -> bool:
    """Ask for probes of an idle connection, and for an end to one whose words are not taken; false for no TCP."""
    return (
        _set(number, socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, IDLE_S)
        and _set(number, socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, ASK_EVERY_S)
        and _set(number, socket.IPPROTO_TCP, socket.TCP_KEEPCNT, QUESTIONS)
        and _set(number, socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, LOST_AFTER_S * 1000)
        and _set(number, socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    )


def _set(number: int, level: int, option: int, value: int) -> bool:
    """Set an option of a socket by its number: Python's own object would change whether it blocks."""
    data = ctypes.c_int(value)
    return not _libc.setsockopt(number, level, option, ctypes.byref(data), ctypes.sizeof(data))


def _sockets() -> dict[int, str]:
    """Return every socket of this process: its descriptor, and what the kernel calls it."""
    found = {}
    for entry in Path("/proc/self/fd").iterdir():
        try:
            name = os.readlink(entry)
        except OSError:
            continue  # closed meanwhile
        if name.startswith("socket:"):
            found[int(entry.name)] = name
    return found


def find_rank() -> tuple[int, int]:
    """Return this process's rank and the number of ranks.

    Raises:
        UsageError: it is one of several, and torch.distributed is not initialised.
    """
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    place = find_place()
    if place is not None and place.world_size > 1:
        raise UsageError(
            f"this is rank {place.rank} of {place.world_size}, and torch.distributed is not initialised: "
            "call stepkeeper_trainer.start_distributed() first"
        )
    return 0, 1


USUAL_LIMIT_S = 1800.0  # torch's own for gloo
CONNECT_WITHIN_S = 60.0  # ranks that are slow to come make no launch fail, however short a save may be


def hang_limit_s() -> float:
    """Return how long torch itself lets a collective of the script wait, in seconds."""
    if dist.is_available() and dist.is_initialized():
        for device in ("cuda", "cpu"):
            with suppress(AttributeError, RuntimeError):  # no backend for it, or one without options
                backend = dist.distributed_c10d._get_default_group()._get_backend(torch.device(device))  # noqa: SLF001
                return float(backend.options._timeout.total_seconds())  # noqa: SLF001
    return USUAL_LIMIT_S


def close(*own: Any | None) -> None:
    """End groups of the library: torch's threads would else outlive the interpreter, and abort the process."""
    for group in own:
        if group is not None:
            dist.destroy_process_group(group)


SPARE_DESCRIPTORS = 512  # that the script and torch may need beside a group of ours


def new_group(within_s: float) -> Any | None:
    """Make a gloo group of all ranks; None without torch.distributed.  All ranks call it in one order.

    gloo connects each rank with all others: a group costs as many sockets as there are ranks.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return None
    make_room(dist.get_world_size() + SPARE_DESCRIPTORS)
    with noted():
        return dist.new_group(backend="gloo", timeout=timedelta(seconds=max(within_s, CONNECT_WITHIN_S)))


def make_room(descriptors: int) -> None:
    """Raise this process's soft limit of open files where fewer than so many more would fit, as far as it may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        used = len(os.listdir("/proc/self/fd"))
    except OSError:  # none is free to look
        used = max(0, soft)
    wanted = used + descriptors
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


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


START_WITHIN_S = 300.0


def start_distributed() -> Place:
    """Join the other ranks (torchrun's variables, else Slurm's) and say which rank this is.

    A process alone stays alone: no process group is made.  CPU ranks use gloo; GPU ranks NCCL, with gloo
    beside it for what lives on the CPU.

    Raises:
        UsageError: the variables contradict each other.
        torch.distributed.DistError: the other ranks were not met within `START_WITHIN_S`.
    """
    place = find_place()
    if place is None or (place.world_size == 1):
        if torch.cuda.is_available() and place is not None:
            torch.cuda.set_device(place.local_rank % torch.cuda.device_count())
        return place or Place()
    if torch.cuda.is_available():
        # Slurm may show each task one GPU only, or all of the node's.
        torch.cuda.set_device(place.local_rank % torch.cuda.device_count())
        backend = "cpu:gloo,cuda:nccl"
    else:
        backend = "gloo"
    dist.init_process_group(
        backend,
        init_method=f"tcp://{place.master_address}:{place.master_port}",
        rank=place.rank,
        world_size=place.world_size,
        timeout=timedelta(seconds=START_WITHIN_S),
    )
    return place
