"""Groups of all ranks that are the library's own, objects sent over them, and the start of torch.distributed.

gloo connects each rank of a group with all others.  So a `Group` is a tree of gloo groups.  Each `FAN_OUT` ranks are
one, the first ranks of each are groups again, and so on up to rank 0.  A rank has fewer than `FAN_OUT` sockets a level,
however many ranks there are.  Up to `FAN_OUT` ranks there is one level.

torch's own `new_group` must be called by all ranks for each group, or names it by how many groups a rank has.  The
first ranks have more than the others.  So the groups are made as torch makes them, under names that all members know.

Torch's own `*_object` collectives turn the bytes that they receive into an object by way of a NumPy array, and fail
without NumPy ("Numpy is not available"): see `buffers`.  Objects are pickled here too, as torch does it.
"""

from __future__ import annotations

import itertools
import pickle
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from stepkeeper_trainer.buffers import view_bytes
from stepkeeper_trainer.coordinate import connections
from stepkeeper_trainer.environment import Place, find_place
from stepkeeper_trainer.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence


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


FAN_OUT = 32
"""Ranks that one gloo group connects."""
SPARE_DESCRIPTORS = 512  # that the script and torch may need beside a group of ours
SLICE_S = 0.1  # a wait in a thread looks so often whether the process ends
_names: WeakKeyDictionary[Any, Iterator[str]] = WeakKeyDictionary()
"""Of the groups over a store, which all ranks make in one order: see `_name_over`."""
_open: set[Group] = set()  # torch's threads end with the last reference, which must wait for `close`


def blocks(rank: int, size: int, fan_out: int) -> Iterator[range]:
    """Yield the ranks of each gloo group that a rank is in, from the lowest level up; groups of one are left out.

    >>> [list(block) for block in blocks(0, 5, 2)], [list(block) for block in blocks(4, 5, 2)]
    ([[0, 1], [0, 2], [0, 4]], [[0, 4]])
    """
    stride = 1
    while stride < size and not rank % stride:
        first = rank - rank % (stride * fan_out)
        block = range(first, min(size, first + stride * fan_out), stride)
        if len(block) > 1:
            yield block
        stride *= fan_out


def _name_over(store: Any, size: int) -> str:
    """Return the next group's name.

    A store is new to Python where a script begins torch.distributed again, maybe with processes that are new, too.  The
    keys behind it may be older, as with torchrun's store, so the ranks count there how often they have begun.
    """
    if store not in _names:
        begun = (store.add(f"stepkeeper/{size}/begun", 1) - 1) // size
        _names[store] = (f"stepkeeper/{size}/{begun}/{serial}" for serial in itertools.count())
    return next(_names[store])


def find_members() -> dict[str, str]:
    """Return the ranks of each gloo group of ours by its name."""
    return {level.name: str(list(level.block)) for group in tuple(_open) for level in group.levels}


def new_group(within_s: float) -> Group | None:
    """Make a group of all ranks; None without torch.distributed.  All ranks call it in one order.

    Args:
        within_s: how long a rank waits for the others in one collective.

    Raises:
        UsageError: this torch has no gloo.
        RuntimeError: the others did not connect.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return None
    if not dist.is_gloo_available():
        raise UsageError("this torch was built without gloo, over which ranks agree: use one with USE_GLOO=1")
    rank, size = dist.get_rank(), dist.get_world_size()
    store = dist.distributed_c10d._get_default_store()  # noqa: SLF001  # torch has no public name for it
    name = _name_over(store, size)
    timeout = timedelta(seconds=max(within_s, CONNECT_WITHIN_S))
    own = list(blocks(rank, size, FAN_OUT))
    connections.make_room(sum(map(len, own)) + SPARE_DESCRIPTORS)
    levels: list[Level] = []
    with connections.noted():
        for block in own:
            at = f"{name}/{block.step}/{block.start}"
            levels.append(Level(*_connect(at, store, block, rank, timeout), block, size, at))
    group = Group(name, rank, size, levels)
    _open.add(group)
    return group


class Group:
    """All ranks.  Each of its methods is called by all of them, in one order."""

    def __init__(self, name: str, rank: int, size: int, levels: list[Level]) -> None:
        """Take this rank's gloo groups, from the lowest level up."""
        self.name, self.rank, self.size, self.levels = name, rank, size, levels

    def close(self) -> None:
        """End its connections and torch's threads.

        Those threads want the interpreter, to let tensors go.  torch gives it free while a backend ends.  It does not
        while a group ends that holds the last reference to its backend (torch 2.6): so the groups go first.
        """
        _open.discard(self)
        backends = [level.transport for level in self.levels]
        self.levels = []
        backends.clear()

    def start_reduce_max(self, numbers: torch.Tensor, goes_on: Callable[[], bool]) -> Any | None:
        """Begin to take the largest of each number over all ranks, in place; return torch's work.

        None where it is complete: with more than one level, each waits for the one before, while the process `goes_on`.

        Raises:
            RuntimeError: another rank ended, or this process does.
        """
        if len(self.levels) == 1 and self.levels[0].is_top:
            return self.levels[0].start_reduce_max(numbers)
        for work in self._reduce_max(numbers):
            while not wait(work, SLICE_S):
                if not goes_on():
                    raise RuntimeError("this process ends")
        return None

    def reduce_max(self, numbers: torch.Tensor, within_s: float | None = None) -> None:
        """Take the largest of each number over all ranks, in place.

        Raises:
            RuntimeError: another rank ended, or did not come within `within_s` seconds.
        """
        limit_at = None if within_s is None else time.monotonic() + within_s
        for work in self._reduce_max(numbers):  # torch takes 0 for as long as the group waits
            work.wait(timedelta(seconds=0 if limit_at is None else max(0.001, limit_at - time.monotonic())))

    def _reduce_max(self, numbers: torch.Tensor) -> Iterator[Any]:
        """Begin one gloo collective after another; each is complete when the next is asked for."""
        for level in self.levels:
            yield level.start_reduce_max(numbers)
        for level in reversed(self.levels):
            if not level.is_top:
                yield level.start_broadcast(numbers)

    def all_gather(self, value: Any) -> list[Any]:
        """Return every rank's `value`, on every rank."""
        found: list[Any] = self.broadcast(self.gather(value))
        return found

    def gather(self, value: Any) -> list[Any] | None:
        """Return every rank's `value` on rank 0; None on the others."""
        parts = [pickle.dumps(value)]
        for level in self.levels:
            received = level.gather(level.join(parts))
            if received is None:
                return None
            parts = [part for data in received for part in level.split(data)]
        return [_unpacked(part) for part in parts]

    def scatter(self, values: Sequence[Any] | None) -> Any:
        """Return this rank's one of the `values` that rank 0 has, one a rank; the others give None."""
        parts = None if values is None else [pickle.dumps(value) for value in values]
        for level in reversed(self.levels):
            shares = None
            if parts is not None:
                step = level.block.step
                shares = [level.join(parts[at : at + step]) for at in range(0, len(parts), step)]
            parts = level.split(level.scatter(shares))
        assert parts is not None
        return _unpacked(parts[0])

    def broadcast(self, value: Any) -> Any:
        """Return the `value` of rank 0, on every rank."""
        data = pickle.dumps(value) if self.rank == 0 else None
        for level in reversed(self.levels):
            data = level.broadcast(data)
        return value if data is None or self.rank == 0 else _unpacked(data)


@dataclass(frozen=True, slots=True)
class Level:
    """One gloo group of a rank, whose first rank stands for all of it one level up."""

    gloo: dist.ProcessGroup
    transport: dist.ProcessGroupGloo
    """What `gloo` calls, which must end first (`Group.close`): CPython ends slots in the order of their names."""
    block: range
    """Its ranks, each of which stands for `block.step` ranks, itself included; fewer at the end."""
    size: int
    """Of the whole."""
    name: str
    """As torch's recorder of collectives has it."""

    @property
    def is_top(self) -> bool:
        """Whether no level is above."""
        return self.block.start == 0 and self.block[-1] + self.block.step >= self.size

    @property
    def leads(self) -> bool:
        """Whether this rank is the first one."""
        return bool(self.gloo.rank() == 0)

    def behind(self, rank: int) -> int:
        """Return how many ranks one of its ranks stands for."""
        return min(self.block.step, self.size - rank)

    def start_hearing(self, index: int, words: torch.Tensor, tag: int) -> Any:
        """Begin to take in what one of its ranks, by its place in it, says to this one alone."""
        return self.gloo.recv([words], index, tag)

    def start_saying(self, words: torch.Tensor, tag: int) -> Any:
        """Begin to say something to the first rank alone."""
        return self.gloo.send([words], 0, tag)

    def join(self, parts: list[bytes]) -> bytes:
        """Return the pickled values of the ranks that one rank stands for as one; `split` undoes it."""
        return parts[0] if self.block.step == 1 else pickle.dumps(parts)

    def split(self, data: bytes) -> list[bytes]:
        """Return the pickled values of the ranks that one rank stands for."""
        return [data] if self.block.step == 1 else _unpacked(data)

    def start_reduce_max(self, numbers: torch.Tensor) -> Any:
        """Begin to take the largest of each number, on the first rank at least; on all at the top."""
        if self.is_top:
            return self.gloo.allreduce([numbers], _options(dist.AllreduceOptions, reduceOp=dist.ReduceOp.MAX))
        return self.gloo.reduce([numbers], _options(dist.ReduceOptions, reduceOp=dist.ReduceOp.MAX, rootRank=0))

    def start_broadcast(self, tensor: torch.Tensor) -> Any:
        """Begin to give all the first rank's tensor."""
        return self.gloo.broadcast([tensor], _options(dist.BroadcastOptions, rootRank=0))

    def gather(self, data: bytes) -> list[bytes] | None:
        """Return the bytes of each rank on the first; None on the others."""
        own = _tensor(data)
        sizes = torch.zeros(len(self.block), dtype=torch.int64)
        sizes[self.gloo.rank()] = len(own)
        self.gloo.allreduce([sizes], _options(dist.AllreduceOptions, reduceOp=dist.ReduceOp.SUM)).wait()
        largest = int(sizes.max())
        received = [torch.empty(largest, dtype=torch.uint8) for _ in self.block] if self.leads else None
        outputs = [] if received is None else [received]
        self.gloo.gather(outputs, [_padded(own, largest)], _options(dist.GatherOptions, rootRank=0)).wait()
        if received is None:
            return None
        return [_bytes(tensor[:size]) for tensor, size in zip(received, sizes.tolist(), strict=True)]

    def scatter(self, shares: Iterable[bytes] | None) -> bytes:
        """Return this rank's bytes of those that the first one has, one a rank; the others give None."""
        tensors = None if shares is None else [_tensor(data) for data in shares]
        sizes = torch.tensor([len(each) for each in tensors]) if tensors is not None else torch.zeros(len(self.block))
        sizes = sizes.to(torch.int64)
        self.start_broadcast(sizes).wait()
        largest = int(sizes.max())
        received = torch.empty(largest, dtype=torch.uint8)
        inputs = [] if tensors is None else [[_padded(each, largest) for each in tensors]]
        self.gloo.scatter([received], inputs, _options(dist.ScatterOptions, rootRank=0)).wait()
        return _bytes(received[: int(sizes[self.gloo.rank()])])

    def broadcast(self, data: bytes | None) -> bytes:
        """Return the first rank's bytes; the others' are not looked at."""
        tensor = _tensor(data) if data is not None and self.leads else None
        size = torch.tensor([0 if tensor is None else len(tensor)])
        self.start_broadcast(size).wait()
        if tensor is None:
            tensor = torch.empty(int(size), dtype=torch.uint8)
        self.start_broadcast(tensor).wait()
        return _bytes(tensor)


def _connect(
    name: str, store: Any, block: range, rank: int, timeout: timedelta
) -> tuple[dist.ProcessGroup, dist.ProcessGroupGloo]:
    """Return a gloo group, made as torch makes its own, and its backend; torch's recorder knows it by its name."""
    store = dist.distributed_c10d.PrefixStore(name, store)
    group = dist.ProcessGroup(store, block.index(rank), len(block))
    backend = dist.ProcessGroupGloo(store, block.index(rank), len(block), timeout)
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)  # noqa: SLF001
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)  # noqa: SLF001
    group._set_group_name(name)  # type: ignore[arg-type]  # noqa: SLF001  # a str
    group._set_group_desc("stepkeeper")  # noqa: SLF001
    return group, backend


def _options(kind: Any, **values: Any) -> Any:
    """Return torch's options of a collective, which its constructors do not take."""
    options = kind()
    for name, value in values.items():
        setattr(options, name, value)
    return options


def wait(work: Any, seconds: float) -> bool:
    """Wait for a collective; false while it is not complete.

    Raises:
        RuntimeError: it has failed.
    """
    try:
        work.wait(timedelta(seconds=seconds))
    except RuntimeError:
        if not work.is_completed():
            return False
        work.wait()  # it has failed, or came right after the time was over
    return True


def _unpacked(data: bytes) -> Any:
    return pickle.loads(data)  # noqa: S301  # of our own ranks


def _tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _bytes(tensor: torch.Tensor) -> bytes:
    return bytes(view_bytes(tensor))


def _padded(data: torch.Tensor, size: int) -> torch.Tensor:
    if len(data) == size:
        return data
    padded = torch.zeros(size, dtype=torch.uint8)
    padded[: len(data)] = data
    return padded


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
