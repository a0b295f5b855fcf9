"""One save at a time: staged at a step boundary, then written and committed by a thread beside training.

Never two in flight; a failure is said and leaves training alone.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING

from torch.distributed.checkpoint.api import CheckpointException

from stepkeeper_trainer.coordinate.agreement import Proposal
from stepkeeper_trainer.coordinate.ending import Ended
from stepkeeper_trainer.errors import DividedError, DriftError, SaveError, UnequalError
from stepkeeper_trainer.formats.messages import SaveStarted, shorten
from stepkeeper_trainer.load.reader import root_cause
from stepkeeper_trainer.log import say, warn
from stepkeeper_trainer.save.commit import CommittedStep, Completer, Listeners
from stepkeeper_trainer.save.persist import Persister
from stepkeeper_trainer.save.planner import Planner
from stepkeeper_trainer.save.save import Failing, Phase, Save, Summary
from stepkeeper_trainer.save.staging import Staging
from stepkeeper_trainer.worker import Worker

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    import torch

    from stepkeeper_trainer.coordinate.ending import RollCall
    from stepkeeper_trainer.coordinate.groups import Group
    from stepkeeper_trainer.errors import StepkeeperError
    from stepkeeper_trainer.link import Link
    from stepkeeper_trainer.save.commit import BeforeCommit, Commits
    from stepkeeper_trainer.save.planner import Divided
    from stepkeeper_trainer.state.keys import Private
    from stepkeeper_trainer.store.guard import Guard
    from stepkeeper_trainer.tiers.memory import Snapshots
    from stepkeeper_trainer.tiers.uploader import Uploader


PREPARE_WITHIN_S = 600.0
PUT_OFF_AFTER_S = 30.0  # training waits no longer for the memory of a periodic save, on any rank
BEGUN_MAX = 16  # saves that may be on their way from the nodes' disks


class Saver:
    """Starts saves and knows how they ended; on rank 0 it also commits them."""

    def __init__(
        self,
        *,
        commits: Commits,
        rank: int,
        world_size: int,
        group: Group | None,
        private: Private,
        link: Link,
        nonce: str,
        parent: str | None,
        limit_s: float,
        before_commit: BeforeCommit,
        guard: Guard,
        listeners: Listeners,
        uploader: Uploader | None,
        snapshots: Snapshots | None,
        read_back: bool,
        overlap_copies: bool,
        dcp_values: bool,
    ) -> None:
        """Prepare; `nonce` is the same on all ranks, `before_commit` makes a step's rows durable, by a limit."""
        self._commits = commits
        self._rank = rank
        self._link = link
        self._nonce = nonce
        self._limit_s = limit_s
        self._read_back = read_back
        self._guard = guard
        self._failing = Failing(rank=rank, link=link, guard=guard, uploader=uploader)
        self._listeners = listeners
        self._notified = 0  # sequence number of the newest save that the listeners know of
        self.committed = 0  # sequence number of the newest commit (rank 0)
        self.newest: CommittedStep | None = None  # what it was (rank 0)
        self._planner = Planner(rank=rank, group=group, private=private)
        self._drifted = False  # the last save found values that differ (rank 0)
        self.overlap_copies = overlap_copies
        self._staging = Staging(overlap=overlap_copies)
        self._completer = Completer(
            commits=commits,
            world_size=world_size,
            link=link,
            parent=parent,
            before_commit=before_commit,
            on_committed=self._note_own_commit,
            uploader=uploader,
        )
        self._persister = Persister(
            rank=rank,
            staging=self._staging,
            planner=self._planner,
            completer=self._completer,
            uploader=uploader,
            snapshots=snapshots,
            dcp_values=dcp_values,
        )
        self._uploader, self._snapshots = uploader, snapshots
        self._begun: dict[int, Save] = {}  # by sequence number: commits are heard of later
        self._worker = Worker("stepkeeper-save")  # jobs are done in the same order on all ranks
        self._prepared = threading.Event()  # nothing is being prepared
        self._prepared.set()
        self._prepare_began = 0.0  # of the monotonic clock
        self._comparing = False  # what is being prepared finds out which ranks hold different values
        self._failed_elsewhere = 0
        self.ended = Ended()  # ranks that are gone, as far as a roll call has found out
        if uploader is not None:
            uploader.ended = self.ended.of
        self.last: Save | None = None  # or snapshot
        self.last_save: Save | None = None  # that is none
        self.held_step: int | None = None  # of the newest snapshot that all nodes hold
        self.persist_s: float | None = None  # how long the last good save took, from request to durable

    @property
    def busy(self) -> bool:
        """Whether a save or a snapshot is in flight on this rank."""
        return self.last is not None and not self.last.over

    @property
    def saving(self) -> bool:
        """Whether a save is in flight on this rank."""
        return self.last_save is not None and not self.last_save.over

    @property
    def _prepares_long(self) -> bool:
        """Whether the first save's memory is being made still: a save would wait for it, with training."""
        return not self._prepared.is_set() and time.monotonic() >= self._prepare_began + PUT_OFF_AFTER_S

    @property
    def compares(self) -> bool:
        """Whether this rank finds out which ranks hold different values: a save that began now would find them too."""
        return self._comparing and not self._prepared.is_set()

    @property
    def problem(self) -> str | None:
        """Why the last save came to nothing on this rank, on its way to shared storage too."""
        upload = self._uploader.last if self._uploader is not None else None
        last = self.last_save.error if self.last_save is not None else None
        return last or (upload.error if upload is not None else None)

    @property
    def failed_save(self) -> int:
        """Sequence number of the last save, if it came to nothing on this rank."""
        last = self.last_save
        return last.sequence if last is not None and last.over and last.failed else 0

    @property
    def save_sequence(self) -> int:
        """Sequence number of the newest save that is no snapshot; 0 before the first."""
        return self.last_save.sequence if self.last_save is not None else 0

    @property
    def sequence(self) -> int:
        """Sequence number of the newest save or snapshot that was begun; 0 before the first."""
        return self.last.sequence if self.last is not None else 0

    @property
    def broken(self) -> bool:
        """Whether saves need another group: a rank was away for longer than the last save could wait."""
        return self._planner.broken

    def propose(self, *, held: bool, too_dear: bool) -> Proposal:
        """Return what this rank tells the others of its saves.

        Args:
            held: whether periodic ones wait.
            too_dear: whether taking the state down after each step costs this rank too much.
        """
        # asked first: what came of a save, or of a comparison, is known once it is over
        busy = self.busy or self._prepares_long or self.compares
        return Proposal(
            busy=busy,
            failed_save=self.failed_save,
            sequence=self.sequence,
            broken=self.broken,
            committed=self.committed,
            held=held,
            drifted=self.drifted,
            divided=self.divided,
            no_snapshot=self._snapshots is not None and (self._snapshots.waits() or not self._prepared.is_set()),
            too_dear=too_dear,
        )

    @property
    def drifted(self) -> bool:
        """Whether ranks hold different values under one name, and nobody has found out which (rank 0)."""
        return self._drifted and self._planner.divided is None

    @property
    def divided(self) -> bool:
        """Whether it is known which ranks hold different values, and not yet in force."""
        return self._planner.divided is not None

    def take_divided(self, limit_at: float) -> Divided | None:
        """Have it in force which rank saves what by which key; all ranks call it between the same two steps."""
        self._prepared.wait(max(0.0, limit_at - time.time()))
        self._drifted = False
        return self._planner.take_divided()

    def wait_prepared(self, limit_at: float) -> None:
        """Wait until nothing is being prepared, or the limit."""
        self._prepared.wait(max(0.0, limit_at - time.time()))

    def renew(self, group: Group | None) -> None:
        """Take another group.  All ranks call it, while none has a save in flight."""
        before = self._planner.renew(group)
        self._worker.do(partial(_close, before))  # nothing waits in it any more: that thread would
        say("save_group_renewed", rank=self._rank, why="a rank was away for longer than a save could wait")

    def note_agreed(self, agreed: Proposal) -> None:
        """Take note of what all ranks have said of their saves."""
        # rank 0 does not wait for a save that came to nothing on some rank
        self._failed_elsewhere = max(self._failed_elsewhere, agreed.failed_save)
        self.note_committed(agreed.committed)

    def note_committed(self, sequence: int) -> None:
        """Take note that rank 0 has committed a save, and have this rank's listeners told."""
        save = self._begun.get(sequence)
        if self._rank == 0 or save is None or self._notified >= sequence:
            return
        self._notified = sequence
        if save.phase is Phase.REPORTED:
            save.advance(Phase.COMMITTED)
        self._worker.do(lambda: self._listeners.notify(self._committed_step(save)))

    def cancel(self, why: str) -> None:
        """Have the save in flight end as soon as it can, unless it is committed by then.  All ranks call it."""
        last = self.last
        if last is not None and not last.over and last.cancelled is None:
            last.cancelled = why
            say(
                "snapshot_cancelled" if last.snapshot else "save_cancelled",
                step=last.summary.step,
                save_id=last.save_id,
                why=why,
            )

    def give_way(self, limit_at: float = 0.0) -> None:
        """Have a snapshot in flight end as soon as it can, for a save is wanted; wait for that until the limit.

        All ranks call it.
        """
        if self.busy and not self.saving:
            self.cancel("a save is wanted")
            self.wait(limit_at)

    def report_if_stuck(self) -> None:
        """Say once of a save that hangs in the storage that it does; asked at each boundary."""
        self._failing.if_stuck(self.last)

    def wait_before_change(self) -> None:
        """Let a device finish copying, before an optimizer step changes what is copied.  Costs no time on a CPU."""
        self._staging.wait_before_change()

    def estimate_ms(self, now: float) -> tuple[int, int]:
        """Return how long the save in flight may still take, and how long a new one: 0 where nothing is known."""
        whole = self.persist_s or 0.0
        last = self.last_save
        left = whole - (now - last.requested_at) if last is not None and self.saving else 0.0
        return int(1000 * max(0.0, left)), int(1000 * whole)

    def prepare(
        self, tensors: Mapping[str, torch.Tensor], *, compare: bool = False, problem: StepkeeperError | None = None
    ) -> None:
        """Plan and allocate beside training, before the first save.  All ranks call it equally often.

        With `compare` the values of the save before tell which ranks hold different ones.  `problem` says why this
        rank has no state just now: the others hear of it.
        """
        self._prepared.clear()
        self._prepare_began, self._comparing = time.monotonic(), compare
        self._worker.do(lambda: self._prepare(tensors, compare=compare, problem=problem))

    def start(
        self,
        tensors: dict[str, torch.Tensor],
        summary: Summary,
        *,
        sequence: int,
        emergency: bool = False,
        ask_room: bool = False,
        requested_at: float | None = None,
        deadline_at: float | None = None,
        early: frozenset[str] = frozenset(),
        problem: BaseException | None = None,
        snapshot: bool = False,
    ) -> Save:
        """Copy the state and begin to write it, on all ranks at the same boundary.

        All ranks give the same `sequence`, higher than any before: the save's name comes from it.
        With `ask_room` it is given up where there is no room for it.
        Tensors of `early` may change before the optimizer's next step (see `Staging.copy`).
        `problem` says why this rank has no state just now.
        A `snapshot` is held in the nodes' memory; nobody outside the ranks hears of it before it is.
        Whatever goes wrong is an outcome of the save: nothing is raised for it.
        """
        assert not self.busy, "never two saves in flight"
        now = time.time()
        save_id = hashlib.blake2b(f"{self._nonce}/{sequence}".encode(), digest_size=16).hexdigest()
        save = Save(
            sequence=sequence,
            save_id=save_id,
            summary=summary,
            emergency=emergency,
            requested_at=requested_at or now,
            limit_at=min(now + self._limit_s, deadline_at or now + self._limit_s),
            directory=self._commits.in_flight(summary.step, save_id),
            ask_room=ask_room,
            snapshot=snapshot,
            # after one the job ends, and is resumed from what is verified; the other is never on a disk
            read_back=self._read_back and not (emergency or snapshot),
        )
        self.last = save
        if not snapshot:
            self.last_save = self._begun[sequence] = save
            self._begun = dict(list(self._begun.items())[-BEGUN_MAX:])
        if self._rank == 0 and not snapshot:
            self._link.send(SaveStarted(step=summary.step, save_id=save_id, emergency=emergency), keep=True)
        changed = False
        try:
            if problem is not None:
                raise problem  # noqa: TRY301
            longest_s = PUT_OFF_AFTER_S if ask_room else self._limit_s
            if not self._prepared.wait(max(0.0, min(save.limit_at - now, longest_s))):
                raise SaveError("the memory for staging is not ready in time")  # noqa: TRY301
            changed = not self._staging.copy_if_it_fits(tensors, early)
            if changed:
                self._persister.forget()
                self._staging.take(tensors)
                self._staging.regroup([list(tensors)])
                self._staging.copy(tensors, early)
        except (Exception, CheckpointException) as error:  # noqa: BLE001  # training must go on
            problem = error
        save.blocked_s = blocked_s = round(time.time() - now, 4)
        if problem is None:
            save.advance(Phase.WRITING)
        self._worker.do(lambda: self._work(save, tensors, changed=changed, problem=problem))
        if problem is None and not snapshot:
            say("save_started", step=summary.step, save_id=save_id, emergency=emergency, blocked_s=blocked_s)
        return save

    def wait(self, limit_at: float) -> bool:
        """Wait for the save in flight until `limit_at` (Unix seconds); true unless it failed or is late."""
        return _wait(self.last, limit_at)

    def wait_shared(self, limit_at: float, roll: RollCall | None = None) -> bool:
        """Wait until the last save is on shared storage, as far as this rank has to do with it.

        With `roll`, which all ranks then give, those that end meanwhile are not waited for.
        """
        with roll.held(limit_at) if roll is not None else nullcontext():
            written = _wait(self.last_save, limit_at)
        if self._uploader is None:
            return written
        with roll.held(limit_at) if roll is not None else nullcontext():
            return written and self._uploader.wait(limit_at)

    def flush(self, committed: int, limit_at: float) -> bool:
        """Have this rank's listeners hear of a commit, and wait until they have, by `limit_at`; true if they have."""
        self.note_committed(committed)
        return self._worker.wait(max(0.0, limit_at - time.time()))

    def _prepare(self, tensors: Mapping[str, torch.Tensor], *, compare: bool, problem: StepkeeperError | None) -> None:
        try:
            if problem is not None:
                self._planner.decline(str(problem), PREPARE_WITHIN_S)
                raise problem  # noqa: TRY301
            self._persister.prepare(tensors, PREPARE_WITHIN_S, compare=compare)
        except DividedError:
            pass  # at the next boundary it is in force, and prepared again
        except BaseException as error:  # noqa: BLE001  # DCP's own is a BaseException; the first save will tell
            warn("prepare_failed", why=shorten(root_cause(error)))
        finally:
            self._prepared.set()

    def _work(
        self, save: Save, tensors: dict[str, torch.Tensor], *, changed: bool, problem: BaseException | None
    ) -> None:
        """Bring one save to its end.  In the save's thread."""
        error: BaseException | None = problem
        try:
            if problem is not None:
                self._planner.decline(root_cause(problem), save.limit_at - time.time())
                self._staging.signature = None  # laid out anew by the next save
            elif save.snapshot:
                self._persister.hold(save, tensors, changed=changed)
                self._say_held(save)
            else:
                with save.doing(f"making {save.directory}"):
                    self._make_way(save, tensors)
                self._persister.persist(save, tensors, changed=changed, given_up=partial(self._given_up, save))
                self.persist_s = time.time() - save.requested_at
                self._guard.succeeded()
        except BaseException as caught:  # noqa: BLE001  # DCP's own is a BaseException; any would be lost in a thread
            error = caught
        self._settle(save, error)

    def _say_held(self, save: Save) -> None:
        self.held_step = save.summary.step
        if self._rank == 0:
            seconds = round(time.time() - save.requested_at, 3)
            say("snapshot_held", step=save.summary.step, blocked_s=save.blocked_s, seconds=seconds)

    def _note_own_commit(self, save: Save) -> None:
        """On rank 0, right after a commit: in the save's thread, or in that of the copies to shared storage."""
        save.advance(Phase.COMMITTED)
        if self._uploader is None:
            self.persist_s = time.time() - save.requested_at
        self.newest = self._committed_step(save)
        self.committed = self._notified = save.sequence
        self._listeners.notify(self.newest)

    def _committed_step(self, save: Save) -> CommittedStep:
        known = self._completer.committed
        final, manifest = known if known is not None and known[1].save_id == save.save_id else (None, None)
        return CommittedStep(
            step=save.summary.step,
            save_id=save.save_id,
            checkpoints=self._commits.checkpoints,
            emergency=save.emergency,
            epoch_end=save.summary.epoch_end,
            requested_at=save.requested_at,
            blocked_s=save.blocked_s,
            persist_s=self.persist_s if self._rank == 0 else None,
            manifest=manifest,
            name=final.name if final is not None else None,
        )

    def _given_up(self, save: Save, missing: Collection[int]) -> str | None:
        if save.cancelled is not None:
            return f"cancelled: {save.cancelled}"
        if gone := self.ended.of(missing):
            more = f" (and {len(gone) - 1} more)" if len(gone) > 1 else ""
            return f"rank {gone[0]}{more} ended before it had written its part: what it printed last says why"
        return "another rank could not write" if self._failed_elsewhere >= save.sequence else None

    def _make_way(self, save: Save, tensors: Mapping[str, torch.Tensor]) -> None:
        """Look for room and make the directory.  A failure is told to all ranks by the planner, so that none waits."""
        try:
            if save.ask_room:
                self._guard.check_room(tensors, save.limit_at)
            self._make_directory(save)
            if self._rank == 0 and save.summary.epoch_end:
                self._commits.mark_epoch_end(save.save_id)
        except (SaveError, OSError) as problem:
            self._planner.decline(str(problem), save.limit_at - time.time())
            raise

    def _make_directory(self, save: Save) -> None:
        """Make it on rank 0 only, before the ranks agree: one that comes late does not make again what was given up."""
        if self._rank != 0:
            return
        try:
            os.makedirs(save.directory, exist_ok=True)  # the run directory keeps others out
            self._commits.claim(save.directory)
        except OSError as error:
            raise SaveError(f"{save.directory}: cannot be made: {error.strerror}") from error

    def _settle(self, save: Save, error: BaseException | None) -> None:
        """Record how a save ended, and tell who waits for it."""
        try:
            if error is not None and save.phase is Phase.COMMITTED:  # what follows a commit takes nothing back
                warn("after_commit", step=save.summary.step, why=shorten(root_cause(error)))
            elif error is not None:
                save.error = shorten(root_cause(error))
                save.advance(Phase.FAILED)
                self._drifted = self._drifted or isinstance(error, DriftError)
                if save.snapshot:
                    self._persister.give_back(save, error)
                    self._failing.snapshot_failed(save, error, save.error)
                    return
                if isinstance(error, UnequalError):
                    self._failing.taken_again(save, save.error)
                    return
                self._failing.failed(save, save.error)
                if save.cancelled is None:
                    self._guard.failed(error)
        finally:
            save.settled.set()


def _close(group: Group | None) -> None:
    try:
        if group is not None:
            group.close()
    except (RuntimeError, ValueError) as error:  # saves go on: their thread must
        warn("group_not_closed", why=error)


def _wait(save: Save | None, limit_at: float) -> bool:
    """Wait for a save until `limit_at` (Unix seconds); true unless it failed or is late."""
    if save is None:
        return True
    save.settled.wait(max(0.0, limit_at - time.time()))
    return save.over and not save.failed
