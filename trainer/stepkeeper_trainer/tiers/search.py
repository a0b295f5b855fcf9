"""At a start: is a newer step than the chosen one whole, in the nodes' memory, on their disks or in the cold tier?

Then it is brought to shared storage.  A snapshot of which each rank finds its part on its own node is read there.

All ranks call it together.  The first rank of each node tells which parts its disk has; where the parts of all nodes
make a whole step of the run's lineage, every rank copies a share of its node's files to shared storage, and rank 0
commits.  Each chunk is compared with the manifest on its way; a part that is damaged is taken from another node that
has it.  The cold tier is asked only where the newest commit of the lineage is not whole on shared storage.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Protocol

from stepkeeper_trainer.formats import lineage as lineages
from stepkeeper_trainer.formats.manifest import Manifest, step_name
from stepkeeper_trainer.log import say, warn
from stepkeeper_trainer.tiers.copying import Pace, push
from stepkeeper_trainer.tiers.directory import DirectoryTier, LocalTier
from stepkeeper_trainer.tiers.memory import Memory
from stepkeeper_trainer.tiers.peers import Address, Keeping, Sender
from stepkeeper_trainer.tiers.tier import Held, Staging, Tier, TierError, writer_of

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
    nodes: tuple[tuple[int, ...], ...]  # the ranks of each node, lowest first

    @property
    def node(self) -> tuple[int, ...]:
        """The ranks of its node."""
        return next(node for node in self.nodes if self.rank in node)

    @property
    def leads(self) -> bool:
        """Whether it is the first of its node."""
        return self.node[0] == self.rank


@dataclass(frozen=True, slots=True)
class Newer:
    """A step that is newer than what shared storage had."""

    directory: Path
    manifest: Manifest
    loaded: bool = False  # where the nodes hold it, and shared storage does not have it


Load = Callable[[Path, Manifest, frozenset[str]], bool]
"""Loads a snapshot from this node's directory, which has these files, on all ranks together; false where it failed."""
Listen = Callable[[LocalTier], Keeping]
"""Has this node take in files of a step.  Raises TierError or OSError."""
Parts = dict[int, set[str]]
"""The files of a step that a node has, by its first rank."""


@dataclass(frozen=True, slots=True)
class _Offer:
    """A step of which a node has something."""

    save_id: str
    step: int
    created_at: str
    ancestors: tuple[str | None, ...]


def find_place(rank: int, world_size: int, node: str, together: Together) -> Place:
    """Say which ranks share this one's node; `node` names it and its disk.  All ranks call it."""
    nodes: dict[str, list[int]] = {}
    for each, name in enumerate(together.gather(node)):
        nodes.setdefault(name, []).append(each)
    return Place(rank=rank, world_size=world_size, nodes=tuple(tuple(ranks) for ranks in nodes.values()))


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
        load: Load,
        listen: Listen | None,
        pace: Pace | None = None,
    ) -> None:
        """Look at nothing yet; `nodes` are what each node has of its own, what is newest as a rule first.

        `fence` raises where this attempt must not commit any more.  `load` is for snapshots; with `listen` nodes send
        each other the parts that they lack.
        """
        self._load, self._listen = load, listen
        self._place, self._together, self._shared = place, together, shared
        self._nodes, self._cold, self._fence, self._pace = nodes, cold, fence, pace

    def newer_than(self, chosen: Manifest | None) -> Newer | None:
        """Bring the newest whole step that is newer than `chosen`, or load it where the nodes hold it.

        `chosen` is what shared storage has; the same on all ranks.
        """
        held = [self._held_here(tier) for tier in self._nodes]
        own = [(at, _offer(each.manifest)) for at, of_tier in enumerate(held) for each in of_tier]
        told = self._together.gather(own if self._place.leads else [])
        offers = {(at, offer.save_id): offer for node in told for at, offer in node}
        wanted, follow = self._together.share(self._wanted(offers, chosen) if self._place.rank == 0 else None)
        for at, save_id in wanted:
            tier = self._nodes[at]
            mine = next((each for each in held[at] if each.manifest.save_id == save_id), None)
            step, parts = self._parts(tier, save_id, mine)
            found = self._load_here(tier, step, parts) if follow and isinstance(tier, Memory) else None
            found = found or self._bring(tier, step, parts)
            if found is not None:
                return found
        return self._from_cold(chosen) if self._cold is not None else None

    # --- what the nodes have ---------------------------------------------------------------------------

    def _parts(self, tier: LocalTier, save_id: str, mine: Held | None) -> tuple[Held, Parts]:
        """Return a step, as this node holds it if it does, and which files are on the nodes' disks or in memory."""
        own = tier.files(mine) if mine is not None and self._place.leads else None
        parts = {rank: set(files) for rank, files in enumerate(self._together.gather(own)) if files is not None}
        giver = min(parts)
        raw = self._together.gather(mine.raw if mine is not None and self._place.rank == giver else None)[giver]
        return mine or Held.read("", raw, source=f"the parts of save {save_id}"), parts

    def _load_here(self, memory: Memory, held: Held, parts: Parts) -> Newer | None:
        """Load a snapshot where the nodes hold it; None where some rank lacks its part, and does not get it."""
        if held.manifest.world_size != self._place.world_size:
            return None
        lacking = self._lacking(held, parts)
        if lacking and not self._send_parts(memory, held, lacking):
            return None
        mine, here = memory.committed(held.manifest.step, held.manifest.save_id), frozenset[str]()
        with suppress(OSError):
            here = frozenset(memory.files(mine) if mine is not None else ())
        own = {name for name in held.manifest.files if writer_of(name) == self._place.rank}
        if not all(self._together.gather(mine is not None and own <= here)):  # somebody has removed it meanwhile
            return None
        assert mine is not None, "each rank has said so"
        directory = memory.checkpoints / mine.directory
        return Newer(directory, mine.manifest, loaded=True) if self._load(directory, mine.manifest, here) else None

    def _lacking(self, held: Held, parts: Parts) -> dict[tuple[int, ...], int | None]:
        """Return the nodes that lack files which their ranks wrote, each with a first rank of a node that has them."""
        written: dict[int, set[str]] = {}
        for name in held.manifest.files:
            written.setdefault(writer_of(name), set()).add(name)
        found: dict[tuple[int, ...], int | None] = {}
        for node in self._place.nodes:
            own = set().union(*(written.get(rank, ()) for rank in node))
            if not own <= parts.get(node[0], set()):
                found[node] = next((rank for rank, part in sorted(parts.items()) if own <= part), None)
        return found

    def _send_parts(self, memory: Memory, held: Held, lacking: Mapping[tuple[int, ...], int | None]) -> bool:
        """Have nodes send others what those lack; whether all came."""
        if self._listen is None or None in lacking.values():
            return False
        place, keeping, problem = self._place, None, ""
        try:
            if place.leads and place.node in lacking:
                keeping = self._take_in(memory, held)
        except (TierError, OSError, RuntimeError) as error:  # no more threads for this user now
            problem = str(error)
        try:
            told = self._together.gather((keeping.address if keeping is not None else None, problem))
            if not any(each for _, each in told):
                problem = self._send(
                    memory, held, {told[node[0]][0]: node for node in lacking if lacking[node] == place.rank}
                )
            problems = [each for each in self._together.gather(problem) if each]
        finally:
            if keeping is not None:
                keeping.close()
        if place.rank == 0 and problems:
            warn("snapshot_not_sent", step=held.manifest.step, nodes=len(lacking), why=problems[0])
        elif place.rank == 0:
            say("snapshot_sent", step=held.manifest.step, nodes=len(lacking))
        return not problems

    def _take_in(self, memory: Memory, held: Held) -> Keeping:
        """Have this node take in what its ranks wrote.  Raises TierError or OSError."""
        assert self._listen is not None
        mine = memory.committed(held.manifest.step, held.manifest.save_id)
        here = memory.files(mine) if mine is not None else ()
        own = {name: entry for name, entry in held.manifest.files.items() if writer_of(name) in self._place.node}
        memory.require_room(sum(entry.bytes for name, entry in own.items() if name not in here))
        if mine is None:
            memory.adopt(held)
        return self._listen(memory)

    def _send(self, memory: Memory, held: Held, to: Mapping[Address, tuple[int, ...]]) -> str:
        """Send nodes their parts, one after the other; return what went wrong."""
        try:
            for address, ranks in to.items():
                Sender(memory, address, ranks, Pace()).send(held)
        except (TierError, OSError) as error:
            return f"{address.host}: {error}"
        return ""

    def _held_here(self, tier: LocalTier) -> list[Held]:
        try:
            return tier.steps()
        except OSError as error:
            warn("local_tier_failed", rank=self._place.rank, why=error)
            return []

    def _wanted(
        self, offers: Mapping[tuple[int, str], _Offer], chosen: Manifest | None
    ) -> tuple[list[tuple[int, str]], bool]:
        """Return which steps of which tier to try, newest first, and whether `chosen` is the newest commit (rank 0).

        A snapshot that does not follow the newest commit is brought, which records what the run goes back to.
        """
        lineage = lineages.read(self._shared.checkpoints)
        head = lineage.head if lineage is not None and lineage.has_steps else None
        able = [
            (offer.step, offer.created_at, key)
            for key, offer in offers.items()
            if (chosen is None or offer.step > chosen.step) and counts(_manifest(offer), lineage)
        ]
        newest_first = [key for _, _, key in sorted(able, reverse=True)]
        return newest_first, head == (chosen.save_id if chosen is not None else None)

    def _bring(self, tier: LocalTier, held: Held, parts: Parts) -> Newer | None:
        """Have all nodes copy their parts of a step; None where they do not make a whole one."""
        for _ in range(ROUNDS_MAX):
            there = self._together.share(self._there(held) if self._place.rank == 0 else None)
            missing = [name for name in held.manifest.files if name not in there]
            lost = [name for name in missing if not any(name in part for part in parts.values())]
            if lost:
                if self._place.rank == 0:
                    warn(
                        "local_step_incomplete",
                        step=held.manifest.step,
                        save_id=held.manifest.save_id,
                        files=len(lost),
                        why=f"no node that answers has {lost[0]} whole",
                    )
                return None
            if not missing:
                where = "the nodes' memory" if isinstance(tier, Memory) else "the nodes' disks"
                return self._commit(held, where)
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

    def _from_cold(self, chosen: Manifest | None) -> Newer | None:
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

    def _commit(self, held: Held, came_from: str) -> Newer | None:
        """Make what was brought a step of the run; None, on all ranks, with the reason in the log."""
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
        name = self._together.share(name)
        return Newer(self._shared.checkpoints / name, held.manifest) if name is not None else None


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
