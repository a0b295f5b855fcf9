"""Choosing and verifying step directories, on threads of their own."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from stepkeeper.core import effects as do
from stepkeeper.core import events as on
from stepkeeper.reason_text import text
from stepkeeper.supervisor.actions.foreign import ForeignCheckpoints
from stepkeeper.supervisor.actions.verify_pool import Read, VerifyPool, Wanted
from stepkeeper.supervisor.sources.process import Inbox, Part
from stepkeeper_trainer.formats import lineage, steps
from stepkeeper_trainer.formats import verify as verifying
from stepkeeper_trainer.formats.lease import Lease
from stepkeeper_trainer.formats.manifest import Manifest, ManifestError, read_manifest
from stepkeeper_trainer.formats.reading import Reading
from stepkeeper_trainer.formats.verify import Cache, Verdict, names_of_shard, unread, verify
from stepkeeper_trainer.store import space

PROBLEM_CHARACTERS_MAX = 500
SETTLE_MAX_S = 5.0  # a server's clock may be ahead
SETTLE_LOOK_S = 0.1
_WRITER = re.compile(r"__(\d+)_\d+\.distcp")  # the rank that wrote a file


class Writers:
    """Which node wrote a file of a step directory."""

    def __init__(self, nodes: tuple[str, ...], ranks_per_node: int) -> None:
        """Take the nodes of the launch that saved, in the order of its ranks."""
        self._nodes = nodes
        self._ranks_per_node = ranks_per_node

    def node(self, name: str) -> str | None:
        """Return the node; None where the name has none."""
        match = _WRITER.fullmatch(name)
        place = int(match[1]) // self._ranks_per_node if match else len(self._nodes)
        return self._nodes[place] if place < len(self._nodes) else None

    def of_shards(self, manifest: Manifest, of: int) -> Mapping[int, frozenset[str]]:
        """Return for each shard the nodes that wrote what is in it."""
        found = {}
        for index in range(of):
            nodes = {self.node(name) for name in names_of_shard(manifest, index, of)}
            found[index] = frozenset(node for node in nodes if node is not None)
        return found


class Verification:
    """Verifies step directories, large ones together with the watchers of the other nodes."""

    def __init__(self, pool: VerifyPool) -> None:
        self.readers: set[str] = set()
        self.bytes_read = 0
        self._pool = pool
        self._number = pool.begin()
        self._began = time.monotonic()

    @property
    def seconds(self) -> float:
        """How long it has taken so far."""
        return time.monotonic() - self._began

    def is_old(self) -> bool:
        """Tell whether a newer verification has begun: what this one says is not wanted any more."""
        return self._pool.is_old(self._number)

    def check(
        self, directory: Path, cache: Cache | None, *, from_disk: bool = False, writers: Writers | None = None
    ) -> Verdict:
        """Look at a step directory, and read what has not been found right before."""
        looked = verify(directory, deep=False, cache=cache)
        if not looked.ok:
            return looked
        size, left = unread(directory, cache or Cache(directory.parent, knows=False))
        of = self._pool.limits.count_shards(size, self._pool.size)
        if of > 1 and left > size // self._pool.size:  # else it is less to read alone what is not known yet
            try:
                avoid = writers.of_shards(read_manifest(directory), of) if writers else {}
            except (OSError, ManifestError) as error:
                return Verdict(directory, (str(error),), 0)
            wanted = Wanted(directory=directory, of=of, from_disk=from_disk, avoid=avoid)
            read = self._pool.read(wanted, self._number, cache) or Read(verdict=looked, readers=())
            verdict, readers = read.verdict, read.readers
        else:
            reading = Reading(
                bytes_per_s=self._pool.limits.bytes_per_s,
                from_disk=from_disk,
                first_only=True,
                should_stop=self.is_old,
            )
            verdict = verify(directory, reading=reading, cache=cache)
            readers = (self._pool.own_node,) if verdict.bytes_read else ()
        self.readers.update(readers)
        self.bytes_read += verdict.bytes_read
        return verdict


def choose(
    checkpoints: Path,
    *,
    pool: VerifyPool,
    inbox: Inbox,
    after: threading.Thread | None = None,
    foreign: ForeignCheckpoints | None = None,
) -> None:
    """Find the newest verified step directory; `CheckpointChosen` or `ChoiceFailed` comes, once `after` has ended.

    Where our own library has written none, the newest verified checkpoint of the script's framework.
    """
    verification = Verification(pool)

    def act() -> on.Event | None:
        choice = steps.newest_verified(checkpoints, check=verification.check, should_stop=verification.is_old)
        theirs = None
        if foreign is not None and choice.chosen is None and not choice.skipped:
            theirs = foreign.choose(verification.is_old)
        if after is not None:
            after.join()  # it has a time limit
        if verification.is_old():
            return None
        if theirs is not None:
            return msgspec.structs.replace(theirs, at=inbox.clock.now())
        damaged = {step.path for step, _ in space.damaged_in_a_row(choice)}
        skipped = tuple(
            on.Skipped(
                directory=step.path.name,
                problem="; ".join(problems)[:PROBLEM_CHARACTERS_MAX],
                damaged=step.path in damaged,
            )
            for step, problems in choice.skipped
        )
        chosen = choice.chosen
        return on.CheckpointChosen(
            at=inbox.clock.now(),
            directory=str(chosen.path) if chosen else None,
            step=chosen.step if chosen else None,
            skipped=skipped,
            bytes_read=verification.bytes_read,
            seconds=verification.seconds,
            readers=tuple(sorted(verification.readers)),
        )

    def failed(error: str) -> on.ChoiceFailed:
        return on.ChoiceFailed(at=inbox.clock.now(), error=error)

    inbox.ask(Part.CHOOSE_CHECKPOINT, act, failed, expected=(OSError,))


def verify_back(
    checkpoints: Path,
    effect: do.VerifyCheckpoint,
    *,
    writers: Writers | None,
    patient: bool,
    pool: VerifyPool,
    inbox: Inbox,
) -> None:
    """Read back one step directory; `CheckpointVerified` comes, unless a newer verification begins.

    Args:
        checkpoints: where it is.
        effect: which, and how.
        writers: which node wrote what, so that others read it.
        patient: let the files settle first; only then the result can be remembered.
        pool: who reads.
        inbox: where the answer goes.
    """
    name = effect.directory
    verification = Verification(pool)

    def act() -> on.Event | None:
        if patient:
            _let_settle(checkpoints / name, verification.is_old)
        verdict = verification.check(
            checkpoints / name, Cache(checkpoints, knows=False), from_disk=effect.from_disk, writers=writers
        )
        if verification.is_old():
            return None
        return on.CheckpointVerified(
            at=inbox.clock.now(),
            directory=name,
            ok=verdict.ok,
            problem="; ".join(verdict.problems)[:PROBLEM_CHARACTERS_MAX],
            seconds=verification.seconds,
            bytes_read=verification.bytes_read,
            readers=tuple(sorted(verification.readers)),
            gone=not verdict.ok and not (checkpoints / name).is_dir(),
        )

    def failed(error: str) -> on.CheckpointVerified:
        return on.CheckpointVerified(at=inbox.clock.now(), directory=name, ok=False, problem=error)

    inbox.ask(Part.VERIFY_CHECKPOINT, act, failed)


def _let_settle(directory: Path, should_stop: Callable[[], bool]) -> None:
    """Wait until a change of a file would show in its times: a second or two after it was written."""
    try:
        with os.scandir(directory) as entries:
            newest = max((entry.stat(follow_symlinks=False).st_ctime for entry in entries), default=0.0)
    except OSError:
        return  # the verification says what is wrong
    until = time.monotonic() + min(newest + verifying.SETTLED_S - time.time(), SETTLE_MAX_S)
    while time.monotonic() < until and not should_stop():
        time.sleep(SETTLE_LOOK_S)


# Going back to an older step, on a thread of its own: one record in the lineage; nothing is deleted.

WHY_CHARACTERS_MAX = 300


def roll_back(checkpoints: Path, effect: do.RollBack, ours: Lease, *, inbox: Inbox) -> None:
    """Have the lineage lead to the newest verified step below one; `RolledBack` or `Superseded` comes."""

    def act() -> on.Event:
        choice = steps.newest_verified(checkpoints, deep=not effect.quick, below_step=effect.below_step)
        if (newer := inbox.superseded(checkpoints.parent, ours)) is not None:  # reading may take many minutes
            return newer
        chosen = _lead_back(checkpoints, choice, effect, ours.attempt, inbox.clock.now())
        return on.RolledBack(
            at=inbox.clock.now(),
            launch=effect.launch,
            directory=str(chosen.path) if chosen else None,
            step=chosen.step if chosen else None,
        )

    def failed(error: str) -> on.RolledBack:
        return on.RolledBack(at=inbox.clock.now(), launch=effect.launch, error=error)

    inbox.ask(Part.ROLL_BACK, act, failed, expected=(OSError, LookupError))


def _lead_back(
    checkpoints: Path, choice: steps.Choice, effect: do.RollBack, attempt: int, at: float
) -> steps.StepDirectory | None:
    """Write the record of a choice; None: the lineage has no step directory, and it leads to the very start.

    Raises:
        OSError: the step directories or the lineage cannot be read or written.
        LookupError: no older step is whole, or can be read now: a person decides on going back to the very start.
    """
    chosen = choice.chosen
    counted = steps.current_lineage(steps.list_steps(checkpoints), lineage.read(checkpoints))
    if chosen is None and counted:
        problems = "; ".join(problem for _, found in choice.skipped for problem in found)[:PROBLEM_CHARACTERS_MAX]
        none = f"no verified step directory is older than step {effect.below_step}"
        raise LookupError(f"{none}: {problems}" if problems else none)
    why = text(effect.reasons)[:WHY_CHARACTERS_MAX]
    left_out = tuple(lineage.LeftOut(step=each.step, steps=each.steps) for each in effect.skipped_data)
    if effect.suspect:
        for entry in counted:
            if entry.manifest is not None and entry.step >= effect.below_step:
                mark = lineage.Mark(at=at, attempt=attempt, save_id=entry.manifest.save_id, mark=lineage.SUSPECT)
                lineage.append(checkpoints, mark)
    save_id = chosen.manifest.save_id if chosen is not None and chosen.manifest is not None else None
    record = lineage.Rollback(at=at, attempt=attempt, save_id=save_id, why=why, left_out=left_out or None)
    lineage.append(checkpoints, record)
    return chosen


# Trying the storage with bytes that nobody needs, on a thread of its own.

QUICK_BYTES = 4 * 1024 * 1024


def test_storage(directory: Path, effect: do.TestStorage, *, within_s: float, inbox: Inbox) -> threading.Thread:
    """Make a dummy save below a directory; `StorageTested` comes within the limit, before the thread ends."""

    def act() -> on.StorageTested:
        size = space.TEST_BYTES if effect.thorough else QUICK_BYTES
        found = space.storage_test(directory, size=size, limit_s=within_s)
        return on.StorageTested(
            at=inbox.clock.now(),
            ok=found.problem is None,
            problem=(found.problem or "")[:PROBLEM_CHARACTERS_MAX],
            untrue=found.untrue,
            thorough=effect.thorough,
            bytes=found.bytes,
            write_s=found.write_s or 0.0,
            read_s=found.read_s or 0.0,
            from_disk=found.from_disk,
        )

    def failed(error: str) -> on.StorageTested:
        return on.StorageTested(at=inbox.clock.now(), ok=False, problem=error, thorough=effect.thorough)

    return inbox.ask(Part.TEST_STORAGE, act, failed)
