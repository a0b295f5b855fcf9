"""Who writes what: planned by all ranks together once, and again when the state's layout changes.

Torch's planner says what a rank holds, `division` who writes it.  The collectives run in the save's thread, on a gloo
group that nothing else uses.  Between re-plannings one small all-reduce says that nothing has changed.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.distributed.checkpoint.default_planner import create_default_local_save_plan

from stepkeeper_trainer.errors import DividedError, SaveError
from stepkeeper_trainer.formats.plain import collection_paused
from stepkeeper_trainer.save.division import Held, World
from stepkeeper_trainer.save.replicas import Replicas, minority
from stepkeeper_trainer.state.keys import Look, Private, is_sharded, mesh_size

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
    from torch.distributed.checkpoint.planner import SavePlan

    from stepkeeper_trainer.coordinate.groups import Group
    from stepkeeper_trainer.save.division import Part
    from stepkeeper_trainer.save.replicas import Hash


_LEAST_S = 0.1  # of waiting for the other ranks


@dataclass(frozen=True, slots=True)
class Share:
    """What this rank writes, and on rank 0 what there is to know of the whole."""

    items: tuple[MetadataIndex, ...]
    replicas: Replicas  # what this rank holds that others hold too
    metadata: Metadata | None = None
    groups: tuple[tuple[str, ...], ...] = ()  # rank 0: the tensors of each replica group

    @property
    def names(self) -> tuple[str, ...]:
        """The tensors that this rank writes."""
        return tuple(index.fqn for index in self.items)


@dataclass(frozen=True, slots=True)
class Divided:
    """How one rank saves names of which ranks hold different values; on rank 0 how all do."""

    own: Private
    every_rank: tuple[Private, ...] = ()
    names: tuple[str, ...] = ()  # told apart now, and not before
    ranks: tuple[int, ...] = ()  # that hold another value than most; all, where there is no majority
    sharded: tuple[str, ...] = ()  # of the names: those of DTensors whose copies on one mesh differ
    holders: tuple[int, ...] = ()  # of each name: how many ranks have it


class Planner:
    """Kept for the whole launch."""

    def __init__(self, *, rank: int, group: Group | None, private: Private) -> None:
        """Begin with what the checkpoint says of this rank's values (`private`)."""
        self._rank, self._group, self.private = rank, group, private  # `private` is what is in force
        self.share: Share | None = None  # in force
        self.divided: Divided | None = None  # to be in force as soon as all ranks are between two steps
        self.broken = False  # the group has failed, and does not mend itself: `renew` it

    def renew(self, group: Group | None) -> Group | None:
        """Take another group, of the same ranks; return the one before."""
        before, self._group, self.share, self.broken = self._group, group, None, False
        return before

    def agree(
        self,
        tensors: Mapping[str, torch.Tensor],
        *,
        changed: bool,
        problem: str | None,
        within_s: float,
        contents: Mapping[str, Hash | None] = MappingProxyType({}),
    ) -> Share:
        """Return this rank's share.  All ranks call it; `tensors` are looked at, and not read.

        `changed` says that the layout is another than at the last call, and `problem` why this rank cannot write at
        all.  By `contents`, hashes of values, ranks that hold different ones are told apart.

        Raises:
            DividedError: names have several values: `divided` says how they are saved.
            SaveError: some rank cannot write, or the plans contradict each other.
            RuntimeError: another rank died, or did not come in time.
        """
        with self._watched():
            if self._any(changed=changed or self.share is None, problem=problem, within_s=within_s):
                self.share = None
                self.share = self._plan_together(tensors, contents)
        assert self.share is not None
        return self.share

    def decline(self, problem: str, within_s: float) -> None:
        """Take part where this rank could not even begin: the others hear of it, and none waits."""
        try:
            self._any(changed=False, problem=problem, within_s=within_s)
        except SaveError:
            pass  # that is what the others are to hear
        except RuntimeError:
            self.broken = True

    def confirm(self, problem: str | None, within_s: float) -> None:
        """Find out whether all ranks have done what they had to.

        Raises:
            SaveError: some rank has not; on that one it is its own `problem`.
            RuntimeError: another rank died, or did not come in time.
        """
        with self._watched():
            self._any(changed=False, problem=problem, within_s=within_s)

    def gather(self, value: Any) -> list[Any] | None:
        """Return every rank's `value` on rank 0; None on the others.  Raises RuntimeError as `agree`."""
        if self._group is None:
            return [value]
        with self._watched():
            return self._group.gather(value)

    def share_out(self, value: Any) -> Any:
        """Return rank 0's `value` on every rank.  Raises RuntimeError as `agree`."""
        if self._group is None:
            return value
        with self._watched():
            return self._group.broadcast(value)

    @contextmanager
    def _watched(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError:
            self.broken = True
            raise

    def _any(self, *, changed: bool, problem: str | None, within_s: float) -> bool:
        flags = torch.tensor([int(changed), int(problem is not None)], dtype=torch.int64)
        if self._group is not None:
            self._group.reduce_max(flags, max(_LEAST_S, within_s))
        if int(flags[1]):
            raise SaveError(problem or "another rank cannot write")
        return bool(flags[0])

    def _plan_together(self, tensors: Mapping[str, torch.Tensor], contents: Mapping[str, Hash | None]) -> Share:
        with collection_paused():
            own = create_default_local_save_plan(cast("dict[str, Any]", dict(tensors)), self._rank == 0)
            held = Held.of(own, tensors, contents, self.private)
        if self._group is None:
            return share_out(World([held]), own)[0]
        gathered = self._group.gather(held)
        answers: list[Any] | None = None
        whole: Share | None = None
        divided: Divided | None = None
        if gathered is not None:
            try:
                with collection_paused():
                    world = World(gathered)
                    if divided := _find_divided(world, [each.private for each in gathered]):
                        answers = [Divided(each) for each in divided.every_rank]
                    else:
                        whole, answers = share_out(world, own)
            except Exception as error:  # noqa: BLE001  # the others wait for their share: they get the error
                answers = [f"planning failed: {error}"] * len(gathered)
        mine = self._group.scatter(answers)
        if isinstance(mine, str):
            raise SaveError(mine)
        if isinstance(mine, Divided):
            self.divided = divided or mine  # rank 0 alone keeps what is known of all
            raise DividedError("ranks hold different values under one name: each value is saved from now on")
        return whole or share_of(cast("Part", mine), own)

    def take_divided(self) -> Divided | None:
        """Have what was found out be in force, if there is any: all ranks do, between the same two steps."""
        divided, self.divided = self.divided, None
        if divided is not None:
            self.share, self.private = None, divided.own
        return divided


def _find_divided(world: World, private: Sequence[Private]) -> Divided | None:
    """Return which rank saves what by which key, if that is another than what is in force on some rank."""
    found, seen = world.private()
    if found == list(private):
        return None
    changed = sorted({n for now, then in zip(found, private, strict=True) for n in now.keys() - then.keys()})
    ranks = sorted({rank for name in changed for rank in _odd_ones(name, seen, found)})
    sharded = [name for name in changed if _differs_on_one_mesh([own[name] for own in seen if name in own])]
    holders = [sum(name in own for own in seen) for name in changed]
    return Divided(found[0], tuple(found), tuple(changed), tuple(ranks), tuple(sharded), tuple(holders))


def _differs_on_one_mesh(looks: Sequence[Look]) -> bool:
    """Tell whether ranks that hold a shard of one DTensor hold different values of it.

    More ranks than a mesh has are on several meshes, such as those of pipeline stages that use the same names: nothing
    promises that their values are equal.
    """
    for kind, holders in Counter(look.kind for look in looks).items():
        held = {(look.box, look.content) for look in looks if look.kind == kind}
        if is_sharded(kind) and holders <= mesh_size(kind) and len(held) > len({box for box, _ in held}):
            return True
    return False


def _odd_ones(name: str, seen: Sequence[Mapping[str, Look]], private: Sequence[Private]) -> tuple[int, ...]:
    """Return the ranks whose value of a name fewer ranks hold; all that hold it where there is no majority."""
    return minority({rank: private[rank].get(name, name) for rank, own in enumerate(seen) if name in own})


def share_out(world: World, own: SavePlan) -> tuple[Share, list[Part]]:
    """Give every chunk to one rank; return the share of rank 0, whose plan is `own`, and those of all on their way."""
    parts, metadata, groups = world.share_out()
    return dataclasses.replace(share_of(parts[0], own), metadata=metadata, groups=groups), parts


def share_of(part: Part, plan: SavePlan) -> Share:
    """Return the share that a part gives to a rank with this plan."""
    return Share(part.items(plan), part.named_replicas(plan))
