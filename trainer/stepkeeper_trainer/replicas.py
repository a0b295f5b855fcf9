"""Copies of one tensor on several ranks must be equal: where they are not, a device computes wrongly.

Each rank hashes what others hold too (see `comparing`); the hashes travel with its report, and rank 0 compares them.
They are folded into so many buckets a group of ranks that a report stays small.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import xxhash

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch.distributed.checkpoint.metadata import MetadataIndex

    from stepkeeper_trainer.comparing import Hash

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


def find_replicas(plans: Sequence[Sequence[MetadataIndex]]) -> tuple[list[Replicas], tuple[tuple[str, ...], ...]]:
    """Return what each rank holds together with others, and the tensors of each group of ranks."""
    holders: dict[MetadataIndex, list[int]] = {}
    for rank, plan in enumerate(plans):
        for index in plan:
            holders.setdefault(index, []).append(rank)
    groups: dict[tuple[int, ...], list[str]] = {}
    for index, ranks in holders.items():
        if len(ranks) > 1:
            groups.setdefault(tuple(ranks), []).append(index.fqn)
    found: list[list[tuple[int, tuple[str, ...]]]] = [[] for _ in plans]
    for number, (holding, names) in enumerate(groups.items()):
        for rank in holding:
            found[rank].append((number, tuple(names)))
    return [Replicas(tuple(groups_)) for groups_ in found], tuple(tuple(names) for names in groups.values())


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
