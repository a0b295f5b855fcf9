"""At a start: is a newer step than the chosen one whole, on the nodes' disks or in the cold tier?  Then bring it.

All ranks call it together.  The first rank of each node tells which parts its disk has; where the parts of all nodes
make a whole step of the run's lineage, every rank copies a share of its node's files to shared storage, and rank 0
commits.  Each chunk is compared with the manifest on its way; a part that is damaged is taken from another node that
has it.  The cold tier is asked only where the newest commit of the lineage is not whole on shared storage.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any, Protocol

from stepkeeper_trainer.formats import lineage as lineages
from stepkeeper_trainer.formats.manifest import Manifest, step_name
from stepkeeper_trainer.log import say, warn
from stepkeeper_trainer.tiers.copying import Pace, push
from stepkeeper_trainer.tiers.directory import DirectoryTier, LocalTier
from stepkeeper_trainer.tiers.memory import Memory
from stepkeeper_trainer.tiers.tier import Held, Staging, Tier, TierError

ANCESTORS = "ancestors"  # in the manifest's state: save_ids that led to it, newest first; None is the very start
ANCESTORS_MAX = 64
ROUNDS_MAX = 3  # of looking for another copy of what was damaged


class Together(Protocol):
    """What ranks do together (`Agreement`, which needs torch)."""

    def share(self, value: Any) -> Any:
        """Return rank 0's value on every rank."""
        ...

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's value on every rank."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a rank stands among those of its node."""

    rank: int
    world_size: int
    node: tuple[int, ...]  # the ranks of its node, lowest first

    @property
    def leads(self) -> bool:
        """Whether it is the first of its node."""
        return self.node[0] == self.rank


@dataclass(frozen=True, slots=True)
class _Offer:
    """A step of which a node has something."""

    save_id: str
    step: int
    created_at: str
    ancestors: tuple[str | None, ...]


def find_place(rank: int, world_size: int, node: str, together: Together) -> Place:
    """Say which ranks share this one's node; `node` names it and its disk.  All ranks call it."""
    nodes = together.gather(node)
    return Place(rank=rank, world_size=world_size, node=tuple(r for r, name in enumerate(nodes) if name == node))


def counts(manifest: Manifest, lineage: lineages.Lineage | None) -> bool:
    """Say whether a step that shared storage may not have leads on from where the run is.

    It does if it is one of the lineage's commits that count, or if the newest of those is among its ancestors and
    the run has not gone back to that since.
    """
    if lineage is None or not lineage.has_steps:
        return True
    if manifest.save_id in lineage.chain():
        return True
    if lineage.head not in manifest.state.get(ANCESTORS, ()):
        return False
    return lineage.rolled_back_at is None or _seconds(manifest.created_at) > lineage.rolled_back_at


class Gatherer:
    """One a rank, for the start of a launch."""

    def __init__(
        self,
        *,
        place: Place,
        together: Together,
        shared: DirectoryTier,
        nodes: Sequence[LocalTier],
        cold: Tier | None,
        fence: Callable[[], object],
        pace: Pace | None = None,
    ) -> None:
        """Look at nothing yet; `nodes` are what each node has of its own, what is newest as a rule first.

        `fence` raises where this attempt must not commit any more.
        """
        self._place, self._together, self._shared = place, together, shared
        self._nodes, self._cold, self._fence, self._pace = nodes, cold, fence, pace

    def newer_than(self, chosen: Manifest | None) -> str | None:
        """Bring the newest whole step that is newer than `chosen`; return its directory's name below `checkpoints/`.

        `chosen` is what shared storage has; the same on all ranks.
        """
        found = None
        for tier in self._nodes:
            if (newer := self._from_nodes(tier, chosen)) is not None:
                found, chosen = newer
        if found is None and self._cold is not None:
            found = self._from_cold(chosen)
        return found

    # --- the nodes' disks ------------------------------------------------------------------------------

    def _from_nodes(self, tier: LocalTier, chosen: Manifest | None) -> tuple[str, Manifest] | None:
        held = self._held_here(tier)
        offers = [_offer(each.manifest) for each in held] if self._place.leads else []
        told = {offer.save_id: offer for node in self._together.gather(offers) for offer in node}
        wanted = self._together.share(self._wanted(told, chosen) if self._place.rank == 0 else None)
        mine = {each.manifest.save_id: each for each in held}
        for save_id in wanted:
            if (brought := self._bring(tier, save_id, mine.get(save_id))) is not None:
                return brought
        return None

    def _held_here(self, tier: LocalTier) -> list[Held]:
        try:
            return tier.steps()
        except OSError as error:
            warn("local_tier_failed", rank=self._place.rank, why=error)
            return []

    def _wanted(self, offers: dict[str, _Offer], chosen: Manifest | None) -> list[str]:
        """Return which steps to try, newest first (rank 0)."""
        lineage = lineages.read(self._shared.checkpoints)
        able = [
            offer
            for offer in offers.values()
            if (chosen is None or offer.step > chosen.step) and counts(_manifest(offer), lineage)
        ]
        return [offer.save_id for offer in sorted(able, key=lambda each: (each.step, each.created_at), reverse=True)]

    def _bring(self, tier: LocalTier, save_id: str, mine: Held | None) -> tuple[str, Manifest] | None:
        """Have all nodes copy their parts of a step; None where they do not make a whole one."""
        own = tier.files(mine) if mine is not None and self._place.leads else None
        parts = {rank: set(files) for rank, files in enumerate(self._together.gather(own)) if files is not None}
        giver = min(parts)
        raw = self._together.gather(mine.raw if mine is not None and self._place.rank == giver else None)[giver]
        held = Held.read(mine.directory if mine is not None else "", raw, source=f"the parts of save {save_id}")
        for _ in range(ROUNDS_MAX):
            there = self._together.share(self._there(held) if self._place.rank == 0 else None)
            missing = [name for name in held.manifest.files if name not in there]
            lost = [name for name in missing if not any(name in part for part in parts.values())]
            if lost:
                if self._place.rank == 0:
                    warn(
                        "local_step_incomplete",
                        step=held.manifest.step,
                        save_id=save_id,
                        files=len(lost),
                        why=f"no node that answers has {lost[0]} whole",
                    )
                return None
            if not missing:
                where = "the nodes' memory" if isinstance(tier, Memory) else "the nodes' disks"
                name = self._commit(held, where)
                return (name, held.manifest) if name is not None else None
            damaged = self._copy_parts(tier, held, missing, parts)
            for rank, name in damaged:
                parts[rank].discard(name)
        return None

    def _staging(self, held: Held) -> Staging:
        """Return where a step is brought: a copy of it that shared storage has already was passed over as damaged."""
        step = step_name(held.manifest.step)
        return self._shared.staging(held, despite={step, f"{step}.{held.manifest.save_id[:8]}"})

    def _there(self, held: Held) -> set[str]:
        return set(held.manifest.files) - set(self._staging(held).missing())

    def _copy_parts(
        self, tier: LocalTier, held: Held, missing: Sequence[str], parts: dict[int, set[str]]
    ) -> list[tuple[int, str]]:
        """Copy this rank's share of the missing files; return which were not whole, on which nodes, on all ranks."""
        owners = {name: min(rank for rank, part in parts.items() if name in part) for name in missing}
        of_node = [name for name in missing if owners[name] == self._place.node[0]]
        own = of_node[self._place.node.index(self._place.rank) :: len(self._place.node)]
        bad: list[tuple[int, str]] = []
        for name in own:
            try:
                push(tier.tier, held, self._staging(held), [name], pace=self._pace)
            except (TierError, OSError) as error:
                warn("local_part_failed", step=held.manifest.step, file=name, rank=self._place.rank, why=error)
                bad.append((self._place.node[0], name))
        return [each for rank in self._together.gather(bad) for each in rank]

    # --- the cold tier ---------------------------------------------------------------------------------

    def _from_cold(self, chosen: Manifest | None) -> str | None:
        assert self._cold is not None
        candidates: list[Held] = []
        if self._place.rank == 0:
            try:
                candidates = self._cold_candidates(chosen)
            except (TierError, OSError) as error:
                warn("cold_tier_failed", tier=self._cold.name, why=error)
        for number in range(self._together.share(len(candidates))):
            directory, raw = self._together.share(
                (candidates[number].directory, candidates[number].raw) if self._place.rank == 0 else None
            )
            held = Held.read(directory, raw, source=f"{self._cold.name}/{directory}")
            own = list(held.manifest.files)[self._place.rank :: self._place.world_size]
            problem = ""
            try:
                push(self._cold, held, self._staging(held), own, pace=self._pace)
            except (TierError, OSError) as error:
                problem = str(error)
            problems = [each for each in self._together.gather(problem) if each]
            if not problems and (found := self._commit(held, self._cold.name)) is not None:
                return found
            if self._place.rank == 0 and problems:
                warn("cold_step_skipped", step=held.manifest.step, directory=directory, why=problems[0])
        return None

    def _cold_candidates(self, chosen: Manifest | None) -> list[Held]:
        """Return the steps of the cold tier that shared storage lacks, newest first (rank 0)."""
        assert self._cold is not None
        lineage = lineages.read(self._shared.checkpoints)
        if chosen is not None and (lineage is None or lineage.head in (chosen.save_id, None)):
            return []  # steps come to the cold tier from there: it has no newer one
        found = [held for held in self._cold.steps() if counts(held.manifest, lineage)]
        return [held for held in found if chosen is None or held.manifest.step > chosen.step]

    def _commit(self, held: Held, came_from: str) -> str | None:
        """Make what was brought a step of the run; its name, on all ranks, or None with the reason in the log."""
        name, problem = None, ""
        if self._place.rank == 0:
            self._fence()
            try:
                name = self._staging(held).commit()
            except (TierError, OSError) as error:
                problem = str(error)
            if name is not None:
                say("step_brought", step=held.manifest.step, directory=name, came_from=came_from)
            else:
                warn("step_not_brought", step=held.manifest.step, came_from=came_from, why=problem)
        shared: str | None = self._together.share(name)
        return shared


def _offer(manifest: Manifest) -> _Offer:
    ancestors = tuple(manifest.state.get(ANCESTORS, ()))
    return _Offer(manifest.save_id, manifest.step, manifest.created_at, ancestors)


def _manifest(offer: _Offer) -> Manifest:
    return Manifest(
        step=offer.step,
        tokens=0,
        world_size=0,
        created_at=offer.created_at,
        save_id=offer.save_id,
        files={},
        state={ANCESTORS: offer.ancestors},
    )


def _seconds(created_at: str) -> float:
    """Return Unix seconds; a time that cannot be read is long ago."""
    try:
        return datetime.fromisoformat(created_at).replace(tzinfo=timezone.utc).timestamp()
    except ValueError:
        return 0.0
