"""Snapshots: steps that the nodes hold in memory, outside the ranks' processes, and never copy to shared storage.

They are a local tier of their own, below a directory in memory (`/dev/shm`).  A rank that was killed finds its node's
part again; with peer copies the next node has it too.  Each node holds the newest snapshot of which all nodes have
their part, and besides it the one in flight: so a snapshot that is torn leaves the one before.

Anybody can make names in `/dev/shm`.  What is used has to be a directory of this user's own that nobody else may enter,
in one from which nobody else can take it away.  All else is refused, and no link is followed.
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import threading
import time
from pathlib import Path

from stepkeeper_trainer.formats.alone import is_replaceable, why_not_alone
from stepkeeper_trainer.formats.manifest import parse_step_name
from stepkeeper_trainer.log import say, warn
from stepkeeper_trainer.store.memory import memory_left
from stepkeeper_trainer.tiers.directory import TRASH, LocalTier, file_size, give_up
from stepkeeper_trainer.tiers.holding import hold, remove_unless_held
from stepkeeper_trainer.tiers.peers import PeerCopies
from stepkeeper_trainer.tiers.tier import SNAPSHOTS_NAME, Held, TierError, writer_of

ROOM_FACTOR = 1.05  # of what the snapshot before took: manifests, and what has grown
RESERVE_SHARE = 0.1  # of each limit stays free: at the limit the kernel ends the training, and not the snapshot
LOOK_EVERY_S = 1.0  # for room
TRIES = 3
TRY_AGAIN_S = 0.01
LET_GO_WITHIN_S = 2.0  # ranks that were killed are gone by then
REST_S = 60.0  # after a disk error: whatever it is, it is not tried at each step
STALE_S = 86400.0  # a script without a supervisor may be started again until then, and goes on from what it left
WATCHED = "watched"  # a file: a watcher has held the directory, so it is wanted while somebody holds it, and no longer


class NotSharedError(TierError):
    """The ranks of a node write into different directories of one name."""


class Memory(LocalTier):
    """The snapshots of one run on this node."""

    def __init__(self, checkpoints: Path) -> None:
        """Make nothing yet."""
        super().__init__(checkpoints, keep=1)
        self._held: int | None = None
        self._holds = threading.Lock()  # training and the thread of saves both open it

    @property
    def own(self) -> Path:
        """All that this run has here."""
        return self.checkpoints.parent

    def open(self) -> None:
        """Make the directory, unless it is there and nobody else could have put anything into it; hold it from now on.

        Raises:
            TierError: it is not safe.
            OSError: it cannot be made.
        """
        users = self.own.parent
        if is_replaceable(users.parent):
            raise TierError(
                f"{users.parent}: others can replace what is in it: set snapshot_dir to another directory in memory"
            )
        for _ in range(TRIES):
            with contextlib.suppress(FileNotFoundError):  # another run of this user has ended, and taken it away
                for each in (users, self.own, self.checkpoints):
                    with contextlib.suppress(FileExistsError):
                        os.mkdir(each, mode=0o700)
                    _require_own(each)
                with self._holds:
                    self._held = hold(self.own, self._held)
                return
            time.sleep(TRY_AGAIN_S)
        raise TierError(f"{users}: is removed as soon as it is made")

    def begin(self, step: int, save_id: str, size: int) -> Path:
        """Make the directory of a snapshot: somebody may have removed all of memory's since the one before.

        Raises:
            TierError, OSError: as `open`, or there is no room.
        """
        self.open()
        return super().begin(step, save_id, size)

    def require_room(self, size: int) -> None:
        """Refuse where `size` bytes do not fit beside all that is here.

        Raises:
            TierError, OSError: as `open`, or they do not.
        """
        self.open()
        if (why := self._why_no_room(int(size * ROOM_FACTOR))) is not None:
            raise TierError(why)

    def missing(self, held: Held, ranks: tuple[int, ...]) -> list[str]:
        """Return the files of these ranks that a snapshot in flight does not have in full here."""
        directory = self.in_flight(held.manifest.step, held.manifest.save_id)
        files = held.manifest.files.items()
        return [
            name for name, entry in files if writer_of(name) in ranks and file_size(directory / name) != entry.bytes
        ]

    def keep_only(self, directory: str | None) -> None:
        """Remove all snapshots but one; what cannot be removed now is removed the next time."""
        for name in self._beside(directory):
            if name.startswith(TRASH):
                shutil.rmtree(self.checkpoints / name, ignore_errors=True)
            else:
                give_up(self.checkpoints / name)

    def bytes_beside(self, directory: str | None) -> int:
        """Return how much `keep_only` would give back."""
        return sum(
            entry.stat().st_blocks * 512
            for name in self._beside(directory)
            for entry in _entries(self.checkpoints / name)
        )

    def _beside(self, directory: str | None) -> list[str]:
        """Return the other snapshots, by their names alone: manifests may be large, and training waits."""
        names = (entry.name for entry in _entries(self.checkpoints))
        return [n for n in names if n != directory and (n.startswith(TRASH) or parse_step_name(n) is not None)]

    def discard(self) -> None:
        """Remove all that this run has here, and the user's directory where nothing else is in it."""
        give_up(self.own)
        _forget_user(self.own.parent)

    def sweep(self) -> list[str]:
        """Remove what other runs of this user left here when their node or job was killed; return the names."""
        removed = []
        for entry in _entries(self.own.parent):
            path = Path(entry.path)
            if entry.name == self.own.name or not entry.is_dir(follow_symlinks=False):
                continue
            done_with = entry.name.startswith(TRASH) or (path / WATCHED).exists() or _age_s(path) > STALE_S
            with contextlib.suppress(OSError):  # removed meanwhile, or nothing that could be
                if done_with and remove_unless_held(path):
                    removed.append(entry.name)
        return removed

    def why_no_room(self, size: int, directory: str | None) -> str | None:
        """Say why `size` bytes do not fit beside the snapshot in `directory`; None where they do.  Raises OSError."""
        return self._why_no_room(int(size * ROOM_FACTOR) - self.bytes_beside(directory))

    def _why_no_room(self, wanted: int) -> str | None:
        status = os.statvfs(self.checkpoints)
        unit = status.f_frsize
        for where, free, whole in (
            (str(self.checkpoints), status.f_bavail * unit, status.f_blocks * unit),
            *memory_left(),
        ):
            if free - RESERVE_SHARE * whole < wanted:
                return (
                    f"{where}: a snapshot takes {_mib(wanted)}; {_mib(free)} of {_mib(whole)} are free, "
                    f"and {RESERVE_SHARE:.0%} are left to the training"
                )
        return None


class Snapshots:
    """One a rank: what it has to do for a snapshot on its node."""

    def __init__(
        self,
        memory: Memory,
        *,
        ranks: tuple[int, ...],
        rank: int,
        peers: PeerCopies | None,
        whole: str | None = None,
    ) -> None:
        """Begin with what this launch has resumed from, if that is a snapshot; `ranks` are those of this node."""
        self._memory, self._ranks, self._rank, self._peers = memory, ranks, rank, peers
        self._leads = ranks[0] == rank
        self._committed: Held | None = None  # the newest snapshot of which this node has its part
        self._whole = whole  # directory of the newest that all nodes hold
        self._size = 0  # of this rank's part
        self._looked_at = -LOOK_EVERY_S
        self._rest_until = 0.0
        self._no_room: str | None = None

    def expect(self, size: int) -> None:
        """Say how many bytes this rank's part of a snapshot will have."""
        self._size = size

    def waits(self) -> bool:
        """Whether this node can take no snapshot now; asked at each step, and looked at now and then."""
        now = time.monotonic()
        if not self._leads:
            return now < self._rest_until
        if self._peers is not None and self._peers.busy:
            return True
        if now >= self._looked_at + LOOK_EVERY_S:
            self._looked_at = now
            self._note_room(self._find_room())
        return self._no_room is not None or now < self._rest_until

    def _find_room(self) -> str | None:
        copies = 2 if self._peers is not None else 1  # the node before sends its part
        try:
            self._memory.open()  # somebody may have removed it: then there is all the room
            return self._memory.why_no_room(copies * len(self._ranks) * self._size, self._whole)
        except (OSError, TierError) as error:
            return str(error)

    def _note_room(self, why: str | None) -> None:
        """Tell of a lack of room once, and of its end."""
        if why is not None and self._no_room is None:
            warn("snapshots_wait", rank=self._rank, why=why, instead="a relaunch goes on from what is on disk")
        elif why is None and self._no_room is not None:
            say("snapshots_go_on", rank=self._rank, why="there is room again")
        self._no_room = why

    def begin(self, step: int, save_id: str) -> Path:
        """Return where this rank writes its part.  All nodes hold the snapshot before, or it does not count.

        Raises:
            TierError, OSError: there is no room, or the memory refuses.
        """
        if self._leads:
            self._memory.keep_only(self._whole)
        return self._memory.begin(step, save_id, len(self._ranks) * self._size)

    def commit(self, manifest: bytes) -> None:
        """Make this node's part a step of its memory, by its first rank.

        Raises:
            TierError, OSError: not all of it is here.
        """
        if not self._leads:  # nobody else needs to parse it
            return
        held = Held.read("", manifest, source="the manifest of a snapshot")
        name = self._memory.find(held)
        if name is None:
            self._require_all(held)
            name = self._memory.commit(held)
        if name is None:
            raise TierError(f"{self._memory.checkpoints}: was removed while a snapshot was written")
        self._committed = Held(name, held.manifest, manifest)

    def _require_all(self, held: Held) -> None:
        """Refuse a snapshot of which something of this node's ranks is not here.  Raises TierError."""
        missing = self._memory.missing(held, self._ranks)
        if not missing:
            return
        where = self._memory.checkpoints
        if any(writer_of(name) == self._rank for name in missing):
            raise TierError(f"{where}: {missing[0]} was removed while the snapshot was written")
        raise NotSharedError(
            f"{where}: {missing[0]} of rank {writer_of(missing[0])} is not there: the ranks of this node do not share "
            "this directory, as in one container a rank; snapshots are off for this launch: "
            "set snapshot_dir to a directory in memory that they share"
        )

    def held(self) -> None:
        """Take note that all nodes have their parts: the snapshot before is not needed any more."""
        if not self._leads or self._committed is None:
            return
        self._whole = self._committed.directory
        if self._peers is None:
            self._memory.keep_only(self._whole)
        else:  # the one before stays until the copies are made
            self._peers.offer(self._committed)

    def failed(self, step: int, save_id: str, error: BaseException) -> None:
        """Give back what this rank has written of a snapshot that came to nothing."""
        self._memory.forget(step, save_id, self._rank)
        if isinstance(error, NotSharedError):
            self._rest_until = math.inf
        elif isinstance(error, OSError | TierError):
            self._rest_until = time.monotonic() + REST_S

    @property
    def directory(self) -> Path:
        """All that this run has in this node's memory."""
        return self._memory.own

    def discard(self) -> None:
        """Remove all: the run has ended, and its state is on shared storage."""
        if self._leads:
            self._memory.discard()


def hold_told(where: str, held: int | None) -> int:
    """Hold a run's snapshots by what a rank has said of them, and return the descriptor; `held` is that of before.

    Raises:
        TierError: it is not such a place, or not safe.
        OSError: it is not there, or cannot be held.
    """
    own = Path(where)
    if not (os.path.isabs(where) and own.parent.name == f"{SNAPSHOTS_NAME}{os.geteuid()}"):
        raise TierError(f"{where}: not a place of snapshots")
    for each in (own.parent, own):
        _require_own(each)
    (own / WATCHED).touch(mode=0o600)  # before: what fails leaves `held` as it is
    return hold(own, held)


def discard_told(where: str, held: int) -> bool:
    """Remove snapshots that `hold_told` holds; false: ranks or a later launch's watcher do so too.  Raises OSError."""
    alone = remove_unless_held(Path(where), held, within_s=LET_GO_WITHIN_S)
    _forget_user(Path(where).parent)
    return alone


def _forget_user(users: Path) -> None:
    with contextlib.suppress(OSError):  # other runs have something there
        users.rmdir()


def _require_own(path: Path) -> None:
    """Refuse what is no directory of this user alone.  Raises TierError or OSError."""
    found = why_not_alone(path)
    if found is not None:
        raise TierError(f"{path}: {found.text}: have it removed, or set snapshot_dir to another directory in memory")


def _entries(path: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(path) as found:
            return list(found)
    except FileNotFoundError:  # another rank, or another run, has removed it meanwhile
        return []


def _age_s(path: Path) -> float:
    """Return how long ago anything was made or removed there; 0 where it cannot be told."""
    try:
        newest = max(each.stat().st_mtime for each in (path, *path.glob("checkpoints")))
    except OSError:
        return 0.0
    return time.time() - newest


def _mib(size: float) -> str:
    return f"{size / 1024**2:,.0f} MiB"
