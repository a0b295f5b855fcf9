"""Copies of one tensor on several ranks are compared by hash: where they differ, one save of each is needed.

Each rank hashes what others hold too; the hashes travel with its report, folded into so many buckets a group of ranks
that a report stays small, and rank 0 compares them.  Tensors are hashed where they are: what is only compared need not
be staged.  A GPU hashes in the order of its stream, and one number a row comes to the host.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Literal, NamedTuple

import msgspec
import torch
import xxhash

from stepkeeper_trainer.buffers import view_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Container, Mapping, Sequence


BUCKETS_MAX = 1024  # of 8 bytes; tensors beyond that share one, and are named together
_BYTES = 8
_UNKNOWN = "-" * 2 * _BYTES  # a bucket of which this rank did not look at all


@dataclass(frozen=True, slots=True)
class Replicas:
    """What one rank holds that others hold too: by the number of the group of ranks, the names in order."""

    groups: tuple[tuple[int, tuple[str, ...]], ...] = ()

    @property
    def names(self) -> frozenset[str]:
        """All of them."""
        return frozenset(name for _, names in self.groups for name in names)


class Digest(msgspec.Struct, frozen=True, array_like=True):
    """What one rank's copies of a group hash to, bucket by bucket, in hexadecimal."""

    group: int
    buckets: str
    by: str = "bytes"  # how it was hashed: others are no matter of comparison


@dataclass(frozen=True, slots=True)
class Drift:
    """Tensors that differ between ranks which should hold the same; one or a few of `names` do."""

    names: tuple[str, ...]
    ranks: tuple[int, ...]  # in the minority; where there is none, all of them


def digest(replicas: Replicas, hash_of: Callable[[str], Hash | None]) -> tuple[Digest, ...]:
    """Fold the hashes of this rank's copies; `hash_of` gives a tensor's (None: it was not looked at)."""
    found: list[Digest] = []
    for group, names in replicas.groups:
        count = min(len(names), BUCKETS_MAX)
        hashes = [hash_of(name) for name in names]
        by = "".join(sorted({one.by for one in hashes if one is not None}))
        found.append(Digest(group, "".join(_fold(hashes[number::count]) for number in range(count)), by))
    return tuple(found)


def _fold(hashes: Sequence[Hash | None]) -> str:
    whole = xxhash.xxh3_64()
    for one in hashes:
        if one is None:
            return _UNKNOWN
        whole.update(one.value)
    return whole.hexdigest()


def compare(reports: Mapping[int, Sequence[Digest]], groups: Sequence[Sequence[str]]) -> list[Drift]:
    """Return what differs between the ranks' copies; what a rank has not looked at, or in another way, counts so."""
    by_group: dict[int, dict[int, Digest]] = {}
    for rank, digests in reports.items():
        for one in digests:
            by_group.setdefault(one.group, {})[rank] = one
    found: list[Drift] = []
    for group, said in sorted(by_group.items()):
        if len({(one.by, one.buckets) for one in said.values()}) <= 1 or group >= len(groups):
            continue
        names = groups[group]
        count = min(len(names), BUCKETS_MAX)
        for bucket in range(count):
            at = slice(2 * _BYTES * bucket, 2 * _BYTES * (bucket + 1))
            values = {rank: one.by + one.buckets[at] for rank, one in said.items()}
            if len(set(values.values())) > 1:
                found.append(Drift(tuple(names[bucket::count]), minority(values)))
    return found


def minority(values: Mapping[int, str]) -> tuple[int, ...]:
    """Return the ranks that hold another value than most; all, where there is no majority."""
    counts: dict[str, int] = {}
    for value in values.values():
        counts[value] = counts.get(value, 0) + 1
    most = max(counts.values())
    winners = [value for value, count in counts.items() if count == most]
    if len(winners) > 1:
        return tuple(sorted(values))
    return tuple(sorted(rank for rank, value in values.items() if value != winners[0]))


IN_PLACE_BYTES = 64 * 1024  # smaller ones are staged: to look at each by itself takes longer than to copy it
ROW = 1024  # words of 8 bytes, of which one number comes to the host
WORD_BYTES = 8
ROW_BYTES = ROW * WORD_BYTES
BLOCK_BYTES = 4096 * ROW_BYTES  # looked at together: the device needs a few times as much meanwhile


class Hash(NamedTuple):
    """What a tensor hashes to; comparable with one made the same way."""

    value: bytes  # 8
    by: Literal["bytes", "rows"]


class InPlace:
    """Tensors that are hashed where they are, at each save."""

    def __init__(self, names: Collection[str] = (), staged: Container[str] = ()) -> None:
        """Prepare; what is `staged` is hashed from there, but for what is on a GPU."""
        self.names = tuple(names)
        self._staged = staged
        self._found: dict[str, Hash] = {}
        self._rows: dict[str, torch.Tensor] = {}  # pinned; filled by the device
        self._issued: set[str] = set()  # of these names, at this save: a script may move a tensor to the host

    def look(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Hash what is in the host's memory.  `tensors` are those that this rank holds."""
        self._found, self._issued = {}, set()
        for name in self.names:
            if name not in self._staged and not tensors[name].is_cuda:
                self._found[name] = hash_tensor(tensors[name])

    def issue(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Have the GPU hash what it has of these, on the current stream; `of` knows them once that is done."""
        for name, tensor in tensors.items():
            if tensor.is_cuda:
                rows = hash_rows(tensor)
                if name not in self._rows:
                    self._rows[name] = torch.empty_like(rows, device="cpu", pin_memory=True)
                self._rows[name].copy_(rows, non_blocking=True)
                self._issued.add(name)

    def of(self, name: str) -> Hash | None:
        """Return a tensor's hash, if it was hashed where it is."""
        if name in self._issued:
            return Hash(hash_tensor(self._rows[name]).value, "rows")
        return self._found.get(name)


def hash_bytes(data: memoryview | object) -> Hash:
    """Return the hash of bytes."""
    return Hash(xxhash.xxh3_64_digest(data), "bytes")  # type: ignore[arg-type]  # whatever has a buffer


def hash_tensor(tensor: torch.Tensor) -> Hash:
    """Return the hash of a tensor in the host's memory."""
    flat = _bytes(tensor)  # is kept while its bytes are read: it may be a copy
    return hash_bytes(view_bytes(flat))


def hash_rows(tensor: torch.Tensor) -> torch.Tensor:
    """Return one number for each row of `ROW` words of 8 bytes, and one for the rest, as int64 on the tensor's device.

    A word counts by its place: each is multiplied with two numbers of that place, once whole and once its upper half,
    and the products are added up.  Rows that differ anywhere have one number with a probability below 2**-32.
    """
    flat = _bytes(tensor)
    whole = flat.numel() // ROW_BYTES * ROW_BYTES
    rows = [_sums(_words(block).view(-1, ROW)) for block in torch.split(flat[:whole], BLOCK_BYTES) if block.numel()]
    if rest := flat.numel() - whole:
        padded = flat.new_zeros(-(-rest // WORD_BYTES) * WORD_BYTES)
        padded[:rest] = flat[whole:]
        rows.append(_sums(padded.view(torch.int64).view(1, -1)))
    return torch.cat([flat.new_empty(0, dtype=torch.int64), *rows])


def _sums(rows: torch.Tensor) -> torch.Tensor:
    whole, upper = _multipliers(rows.device)
    width = rows.shape[1]
    return (rows * whole[:width]).sum(dim=1) + ((rows >> 32) * upper[:width]).sum(dim=1)


@cache
def _multipliers(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return two numbers for each place in a row: the same on all ranks."""
    digests = (hashlib.blake2b(number.to_bytes(4, "little"), digest_size=8).digest() for number in range(2 * ROW))
    both = torch.tensor([int.from_bytes(each, "little", signed=True) for each in digests], device=device)
    return both[:ROW], both[ROW:]


def _words(flat: torch.Tensor) -> torch.Tensor:
    """Return bytes as words, wherever they begin: a view of a flat buffer may begin within a word."""
    return (flat if flat.storage_offset() % WORD_BYTES == 0 else flat.clone()).view(torch.int64)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a dense tensor in the order of its elements; a copy only where they lie otherwise."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)
