"""The tiers of a run, put together for one rank: made by the CheckpointManager where there are any."""

from __future__ import annotations

import secrets
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from stepkeeper_trainer.coordinate.cadence import snapshot_rule
from stepkeeper_trainer.environment import find_place as find_place_of_rank
from stepkeeper_trainer.errors import UsageError
from stepkeeper_trainer.formats import lineage as lineages
from stepkeeper_trainer.formats.durable import write_atomically
from stepkeeper_trainer.formats.manifest import Manifest
from stepkeeper_trainer.log import say, warn
from stepkeeper_trainer.tiers.cold import ColdCopies, Going, forget_given_up
from stepkeeper_trainer.tiers.copying import Pace
from stepkeeper_trainer.tiers.directory import DirectoryTier, LocalTier, open_tier
from stepkeeper_trainer.tiers.memory import Memory, Snapshots
from stepkeeper_trainer.tiers.peers import Keeping, PeerCopies, interface_host, next_node, own_host
from stepkeeper_trainer.tiers.search import Gatherer, Load, Newer, Place, find_place
from stepkeeper_trainer.tiers.survey import prune
from stepkeeper_trainer.tiers.tier import IDENTITY_NAME, Tier, TierError, Tiers, from_environment, read_identity
from stepkeeper_trainer.tiers.uploader import Uploader

if TYPE_CHECKING:
    from stepkeeper_trainer.coordinate.agreement import Agreement
    from stepkeeper_trainer.save.commit import Commits, CommittedStep


@dataclass(slots=True)
class _Parts:
    """What this rank works with."""

    place: Place
    shared: DirectoryTier
    local: LocalTier | None
    cold: Tier | None
    pace: Pace


class Tiering:
    """One a rank.  It hears of commits as a listener."""

    def __init__(self, tiers: Tiers, commits: Commits, agreement: Agreement, rank: int, world_size: int) -> None:
        """Find out who shares this rank's node; all ranks do so together.

        Raises:
            UsageError: a tier makes no sense, or its library is missing.
        """
        self.tiers, self._commits, self._agreement = tiers, commits, agreement
        self.uploader: Uploader | None = None
        self.snapshots: Snapshots | None = None
        self._copies: ColdCopies | None = None
        self._keeping: list[Keeping] = []
        self._peers: list[PeerCopies] = []
        shared = DirectoryTier(commits.checkpoints, attempt=commits.environment.attempt, read_back=False)
        if rank == 0 and tiers.cold is not None:
            forget_given_up(commits.checkpoints)
        identity = agreement.share(_identity(commits.checkpoints) if rank == 0 else "")
        where = tiers.local_checkpoints(commits.run_directory, identity, commits.environment.node)
        place = find_place(rank, world_size, f"{commits.environment.node}:{where}", agreement)
        rate = tiers.megabytes_per_s
        self._parts = _Parts(
            place,
            shared,
            LocalTier(where, keep=tiers.local_keep) if where is not None else None,
            _open_cold(tiers),
            Pace(rate * 1e6 / len(place.node) if rate is not None else None),
        )
        if self._parts.local is not None and place.leads and (removed := self._parts.local.clear()):
            say("local_leftovers_removed", directories=",".join(removed))
        self._memory = self._open_memory(identity) if tiers.snapshot_every is not None else None

    def _open_memory(self, identity: str) -> Memory | None:
        """Return this node's snapshots; None on all ranks where some node cannot take any.  All ranks call it."""
        environment, place = self._commits.environment, self._parts.place
        memory = Memory(self.tiers.snapshots_of(self._commits.run_directory, identity, environment.node))
        problem = ""
        try:
            memory.open()
            if place.leads:
                memory.clear()
                if removed := memory.sweep():
                    say("snapshots_of_other_runs_removed", directories=",".join(removed))
        except (TierError, OSError) as error:
            problem = f"{environment.node}: {error}"
        problems = [each for each in self._agreement.gather(problem) if each]
        if problems and place.rank == 0:
            warn("snapshots_off", why=problems[0], nodes=len(set(problems)))
        return None if problems else memory

    def newer_than(self, chosen: Manifest | None, load: Load) -> Newer | None:
        """Find a step that is newer than the chosen one in another tier, and bring it or `load` it there.

        All ranks call it.  Raises SupersededError where a newer attempt holds the run.
        """
        parts = self._parts
        gatherer = Gatherer(
            place=parts.place,
            together=self._agreement,
            shared=parts.shared,
            nodes=[each for each in (self._memory, parts.local) if each is not None],
            cold=parts.cold,
            fence=self._commits.check_fence,
            load=load,
            listen=(lambda tier: Keeping(tier, self._own_host())) if self.tiers.peers else None,
        )
        newer = gatherer.newer_than(chosen)
        if parts.place.rank == 0:  # what was copied in part, and is of no use any more
            parts.shared.clear(lambda _save_id: False)
        return newer

    def forget_snapshots(self) -> None:
        """Remove what this node holds in memory: it cannot be used."""
        if self._memory is not None and self._parts.place.leads:
            self._memory.keep_only(None)

    def start(self, resumed: Path | None, manifest: Manifest | None) -> None:
        """Begin to copy: from now on, and what the cold tier lacks of the step that was resumed from."""
        parts = self._parts
        rank = parts.place.rank
        if self._memory is not None:
            # what the launch has resumed from stays until there is a newer one, unless shared storage has it
            whole = resumed.name if resumed is not None and resumed.parent == self._memory.checkpoints else None
            if parts.place.leads:
                self._memory.keep_only(whole)
            peers = self._start_peers(self._memory)
            if peers is not None and whole is not None and manifest is not None:  # a lost node had the copy of it
                held = self._memory.committed(manifest.step, manifest.save_id)
                if held is not None:
                    peers.offer(held)
            self.snapshots = Snapshots(self._memory, ranks=parts.place.node, rank=rank, peers=peers, whole=whole)
        if parts.local is not None:
            peers = self._start_peers(parts.local)
            self.uploader = Uploader(
                parts.local,
                rank=rank,
                leads=parts.place.leads,
                shared=self._commits.checkpoints,
                pace=parts.pace,
                ranks=len(parts.place.node),
                on_local=peers.offer if peers is not None else lambda _held: None,
            )
        if parts.cold is None:
            return
        self._copies = ColdCopies(
            parts.cold,
            shared=parts.shared,
            local=parts.local,
            rank=rank,
            world_size=parts.place.world_size,
            pace=parts.pace,
            fence=self._commits.check_fence,
            after=self._prune,
        )
        if resumed is not None and manifest is not None and resumed.parent == self._commits.checkpoints:
            self._copies.offer(Going(manifest.step, manifest.save_id, resumed))

    def _start_peers(self, local: LocalTier) -> PeerCopies | None:
        """Have the next node keep this one's files too, and keep those of the one before; all ranks do so together.

        Raises:
            UsageError: a node does not have the network interface that is to be used.
        """
        if not self.tiers.peers:
            return None
        place, address = self._parts.place, None
        refusal: UsageError | None = None
        if place.leads:
            try:
                keeping = Keeping(local, self._own_host())
                self._keeping.append(keeping)
                address = keeping.address
            except TierError as error:
                refusal = UsageError(str(error))
            except OSError as error:
                warn("peer_copies_off", rank=place.rank, why=error)
        self._agreement.raise_together(refusal)
        addresses = self._agreement.gather(address)
        leaders = sorted(set(self._agreement.gather(place.node[0])))
        to = next_node(leaders, place.rank) if place.leads else None
        if to is None or addresses[to] is None:
            return None
        copies = PeerCopies(local, addresses[to], place.node, Pace())  # the limit is for storage
        self._peers.append(copies)
        return copies

    def _own_host(self) -> str:
        """Return the address at which the node before reaches this one.  Raises TierError or OSError."""
        if self.tiers.peer_interface is not None:
            return interface_host(self.tiers.peer_interface)
        meeting = find_place_of_rank()
        return own_host(meeting.master_address if meeting is not None else "127.0.0.1")

    def leave(self) -> None:
        """The processes end: what is saved from now on must get to shared storage."""
        if self.uploader is not None:
            self.uploader.leaving = True
            self._parts.pace.lift()  # the last save may have begun before: nobody trains beside its copies

    def discard_snapshots(self) -> None:
        """The run has ended, here at least, and what it came to is on shared storage."""
        if self.snapshots is not None:
            self.snapshots.discard()

    def finish_copies(self, limit_at: float) -> None:
        """The work is finished: its last step goes to the cold tier too, if there is time until `limit_at`."""
        if self._copies is None:
            return
        through = self._parts.place.rank != 0 or self._copies.close(limit_at)
        try:
            through = self._agreement.share(through)  # the others send on until rank 0 has all, or gives up
        except RuntimeError as error:
            warn("rank_lost", why=str(error).splitlines()[0])
        self._copies.close(0.0)
        if not through and self._parts.place.rank == 0:
            warn(
                "cold_copy_unfinished",
                tier=self.tiers.cold,
                why="it fails, or there was no time: `stepkeeper checkpoints copy RUN --to URL` continues it",
            )
        self._copies = None

    def committed(self, step: CommittedStep) -> None:
        """Send a step to the cold tier (a listener's)."""
        if self._copies is not None:
            self._copies.offer(Going(step.step, step.save_id, step.directory))

    def close(self, limit_at: float) -> None:
        """Stop copying (a listener's): nodes that are given back do not wait for the cold tier."""
        if self.uploader is not None:
            self.uploader.close(limit_at)
        for copies in self._peers:
            copies.close()
        for keeping in self._keeping:
            keeping.close()
        if self._copies is not None and not self._copies.close(0.0):
            say("cold_copy_unfinished", tier=self.tiers.cold, why="the process leaves: the next launch continues it")

    def _prune(self) -> None:
        """Remove from the cold tier what it need not keep (rank 0)."""
        assert self._parts.cold is not None
        try:
            lineage = lineages.read(self._commits.checkpoints)
            pinned = [s for s, marks in lineage.marks.items() if lineages.PINNED in marks] if lineage else []
            removed = prune(self._parts.cold, keep=self.tiers.cold_keep, pinned=pinned)
        except (TierError, OSError) as error:
            warn("cold_prune_failed", tier=self.tiers.cold, why=error)
            return
        if removed:
            say("cold_steps_removed", directories=",".join(removed))


def find_tiers(
    given: Tiers | None, commits: Commits, agreement: Agreement, rank: int, world_size: int
) -> Tiering | None:
    """Return the tiers that the script or the environment names; None where there are none.

    All ranks call it.  The environment counts where it names any.

    Raises:
        UsageError: a setting makes no sense.
    """
    try:
        tiers = choose(from_environment(), given)
    except TierError as error:
        raise UsageError(str(error)) from error
    snapshot_rule(tiers.snapshot_every)
    agreement.check_alike(snapshot_every=tiers.snapshot_every)
    return Tiering(tiers, commits, agreement, rank, world_size) if tiers.any else None


def place_in_memory(tiering: Tiering | None) -> str:
    """Return where this node holds snapshots, for its watcher; empty where it holds none."""
    return str(tiering.snapshots.directory) if tiering is not None and tiering.snapshots is not None else ""


def choose(told: Tiers, given: Tiers | None) -> Tiers:
    """Weigh what the environment names against the script's argument.  Raises TierError.

    Places and snapshots are chosen apart: a run that is told to take snapshots keeps the tiers that its script names.
    Compression is the script's alone, also for an object store that the environment names.
    """
    if given is None:
        return told
    given.check()
    tiers = told if told.has_places else given
    held = told if told.snapshot_every is not None else given
    return msgspec.structs.replace(
        tiers,
        snapshot_every=held.snapshot_every,
        snapshot_directory=held.snapshot_directory,
        peers=tiers.peers or held.peers,
        peer_interface=held.peer_interface or tiers.peer_interface,
        cold_zstd=given.cold_zstd if tiers.cold is not None and "://" in tiers.cold else tiers.cold_zstd,
    ).check()


def _open_cold(tiers: Tiers) -> Tier | None:
    if tiers.cold is None:
        return None
    options: dict[str, object] = {}
    if "://" in tiers.cold:  # each rank reads back what it has sent
        options = {"zstd_level": tiers.cold_zstd, "read_back": False}
    elif tiers.cold_zstd is not None:
        raise UsageError(f"cold tier {tiers.cold}: files are compressed in object stores only: leave out cold_zstd")
    try:
        return open_tier(tiers.cold, **options)
    except TierError as error:
        raise UsageError(str(error)) from error


def _identity(checkpoints: Path) -> str:
    """Return what tells this run directory from an earlier one of the same name."""
    path = checkpoints / IDENTITY_NAME
    with suppress(FileNotFoundError):
        return read_identity(checkpoints)
    identity = secrets.token_hex(8)
    write_atomically(path, identity.encode())
    return identity
