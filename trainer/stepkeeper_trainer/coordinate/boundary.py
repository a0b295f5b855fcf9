"""Beginning a save at the boundary of a step: on all ranks at the same one, or on none.

Every decision here is made from what all ranks have agreed on, so all ranks make it alike.
"""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any

import torch

from stepkeeper_trainer.coordinate import groups
from stepkeeper_trainer.coordinate.agreement import Agreement, Call, Proposal
from stepkeeper_trainer.coordinate.ending import TOGETHER_WITHIN_S
from stepkeeper_trainer.errors import StepkeeperError
from stepkeeper_trainer.formats.messages import shorten
from stepkeeper_trainer.formats.plain import collection_paused
from stepkeeper_trainer.log import say, warn
from stepkeeper_trainer.save.save import Summary
from stepkeeper_trainer.save.saver import Saver

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from stepkeeper_trainer.coordinate.requests import Periodic, Requests, SnapshotClock
    from stepkeeper_trainer.save.planner import Divided
    from stepkeeper_trainer.state import TrainingState


HOLD_AFTER = 3  # saves in a row that came to nothing because values of new names differed
HELD_TRIES = 3  # to save one step while training waits: its values do not change any more
DIFFERENCES_MAX = 4  # times that ranks find out what differs, before a save that is waited for
RANKS_REPORTED_MAX = 16
MAKE_UP_MAX = 3  # times that the end of an epoch is saved anew: what fails for ever is not for every step


SURE_FACTOR = 1.5  # a save may take so much longer than the one before


class Boundary:
    """Of one rank."""

    def __init__(
        self,
        *,
        saver: Saver,
        agreement: Agreement,
        requests: Requests,
        periodic: Periodic,
        state: TrainingState,
        group: Any | None,
        save_within_s: float,
        settle: Callable[[], object],
        snapshots: SnapshotClock,
    ) -> None:
        """Prepare; `group` is the one that saves use, `settle` takes in what is known of the newest step."""
        self._saver = saver
        self.agreement = agreement
        self._requests = requests
        self._periodic = periodic
        self._state = state
        self.group = group
        self._save_within_s = save_within_s
        self._settle = settle
        self._snapshots = snapshots
        self._unsaid_save = False  # begun since the ranks last spoke
        self._held_said = False
        self._waits_said = -1  # sequence number of the save in flight that another was said to wait for
        self._epoch_save = 0  # sequence number of the save that marks an epoch's end, until it is made up
        self._made_up, self._making_up = 0, False
        self._unequal = 0  # saves in a row that came to nothing because ranks held different values under new names
        self._unequal_save = 0  # sequence number of the last of them
        self._metrics: dict[str, float] = {}  # the newest that the script has told, for the manifest

    @property
    def wanted(self) -> bool:
        """Whether something asks for a save now."""
        return self._periodic.due or self._requests.save_agreed or self._requests.stop_agreed

    @property
    def saved_step(self) -> int | None:
        """The step of the newest save, unless that has failed."""
        last = self._saver.last_save
        return None if last is None or last.failed else last.summary.step

    @property
    def usual_step_s(self) -> float:
        """How long a step usually lasts."""
        return self._periodic.usual_step_s

    def note_metrics(self, metrics: Mapping[str, float] | None) -> None:
        """Take in what the script says of this step; the newest number of each name goes into the manifest."""
        for name, value in (metrics or {}).items():
            self._metrics[name] = float(value)

    def spoken(self) -> None:
        """The ranks are about to speak: what was begun before, all will know of."""
        last = self._saver.last
        begun = self._unsaid_save and last is not None and not last.snapshot
        self._periodic.spoken(saving=self._saver.saving or begun)
        self._snapshots.spoken()
        self._unsaid_save = False

    def save_as_agreed(self, agreed: Proposal) -> None:
        """Begin a save at this boundary if one is due; an urgent one waits for the one in flight."""
        requests, saver = self._requests, self._saver
        saver.report_if_stuck()
        if agreed.failed_save:
            self._make_up(agreed.failed_save)
        self._count_unequal(agreed)
        urgent = requests.stop_agreed or requests.deadline_at is not None
        if (agreed.divided or agreed.drifted) and not agreed.busy and not self._unsaid_save:
            self._periodic.due = self._periodic.due or agreed.failed_save == saver.save_sequence > 0
            if self._unequal < HOLD_AFTER:
                self._find_differences(drifted=agreed.drifted, limit_at=time.time() + self._save_within_s)
                if not urgent:
                    return  # the save comes when what was found out is in force, and the memory for it is there
        if not self.wanted:
            self._snapshot(agreed)
            return
        saver.give_way()
        if not urgent:
            self._save_due(agreed)
            return
        in_flight = saver.last_save
        if in_flight is not None and in_flight.summary.step == self._state.counters.step:
            requests.served()  # that one is what was asked for
            return
        if agreed.busy or self._unsaid_save:
            self._take_over()
        # One that is over its limit on some rank is left to `finish`.
        self.begin_together(Call.BEGIN, limit_at=requests.limit_at(self._save_within_s), emergency=True)

    def _save_due(self, agreed: Proposal) -> None:
        """Begin a save that nobody waits for; where something stands in its way, it stays due."""
        if agreed.held and not self._requests.save_agreed:
            self._say_held()
        elif agreed.busy or self._unsaid_save:
            self._say_busy()
        elif self._unequal >= HOLD_AFTER:
            self._save_held()
        else:
            self._renew(agreed.broken)
            self._begin(self._state.collect, sequence=agreed.sequence + 1, ask_room=True)

    def _count_unequal(self, agreed: Proposal) -> None:
        """Count saves in a row for which ranks held different values under new names; all ranks count alike."""
        if agreed.committed > self._unequal_save:
            self._unequal = 0
        if (agreed.divided or agreed.drifted) and agreed.failed_save > self._unequal_save:
            self._unequal, self._unequal_save = self._unequal + 1, agreed.failed_save

    def _save_held(self) -> None:
        """Save while training waits: the state gets values under new names faster than ranks can compare them.

        A list that each rank appends its own values to is such a state.
        """
        warn(
            "save_holds_training",
            step=self._state.counters.step,
            why="the state has values under new names at each save, and ranks hold different ones: "
            "keep a buffer as one array for each field",
        )
        limit_at = time.time() + self._save_within_s
        for _ in range(HELD_TRIES):
            if not self.begin_together(Call.BEGIN, limit_at=limit_at):
                return
            failed = not self._saver.wait(limit_at)
            within_s = max(0.0, limit_at - time.time()) + self.agreement.within_s
            if not self.agreement.settle(Call.BEGIN, [int(failed)], within_s=within_s)[0]:
                break
        self._unequal, self._unequal_save = HOLD_AFTER - 1, self._saver.save_sequence  # the next one is tried as usual

    def _snapshot(self, agreed: Proposal) -> None:
        """Begin a snapshot if one is due, and nothing stands in its way; a save at the next boundary would."""
        if not self._snapshots.due or agreed.busy or agreed.no_snapshot or self._unsaid_save:
            return
        if not self._periodic.comes_after(self._state.counters.step):
            self._renew(agreed.broken)
            self._begin(self._state.collect, sequence=agreed.sequence + 1, ask_room=False, snapshot=True)

    def begin_together(
        self,
        call: Call,
        *,
        limit_at: float,
        emergency: bool = False,
        agreement: Agreement | None = None,
        collect: Callable[[], dict[str, torch.Tensor]] | None = None,
    ) -> bool:
        """Begin a save on all ranks or on none, however long theirs in flight take; true if it was begun.

        Args:
            call: the method that all ranks are in; with FINISH it is not begun after `limit_at`, and the others are
                not waited for long.
            limit_at: until when one in flight is waited for; Unix seconds.
            emergency: whether somebody waits for it.
            agreement: that the ranks settle it by, if it is not the main threads'.
            collect: returns the state to save, if it is not the one at hand.

        Raises:
            RuntimeError: another rank died, or did not come.
        """
        saver, last = self._saver, call is Call.FINISH
        agreement, collect = agreement or self.agreement, collect or self._state.collect
        saver.give_way()
        saver.wait(limit_at)
        if saver.compares:
            saver.wait_prepared(limit_at)  # what it finds out is in force before this save
        left_s = max(0.0, limit_at - time.time())
        # a new group is made by main threads only
        unable = saver.busy or (last and not left_s) or (call is Call.NOTICE and saver.broken)
        within_s = left_s + (TOGETHER_WITHIN_S if last else agreement.within_s)
        for _ in range(DIFFERENCES_MAX):
            mine = [int(unable), saver.sequence, int(saver.broken), saver.committed, saver.drifted, saver.divided]
            settled = agreement.settle(call, [int(each) for each in mine], within_s=within_s)
            any_unable, sequence, broken, committed, drifted, divided = settled
            if any_unable or not (drifted or divided):
                break
            known_by = max(limit_at, time.time() + self._save_within_s) if call is Call.SAVE else limit_at
            self._find_differences(drifted=bool(drifted), limit_at=known_by, collect=collect)
            saver.wait_prepared(known_by)
        saver.note_committed(committed)
        if not any_unable:
            self._renew(bool(broken))
            self._begin(collect, sequence=sequence + 1, emergency=emergency, ask_room=not (emergency or last))
        return not any_unable

    def _find_differences(
        self, *, drifted: bool, limit_at: float, collect: Callable[[], dict[str, torch.Tensor]] | None = None
    ) -> None:
        """Have each value saved of names that have several; or find out first which ranks hold which.

        All ranks call it between the same two steps.
        """
        divided = self._saver.take_divided(limit_at)
        if divided is not None:
            self._state.divide(divided.own, divided.every_rank)
            self._report_divided(divided)
        tensors, problem = _try(collect or self._state.collect)
        self._saver.prepare(tensors, compare=drifted and divided is None, problem=problem)

    def _report_divided(self, divided: Divided) -> None:
        """Tell on rank 0 which values differ: as a fault of a device where their types say that they are equal.

        A parameter that was equal in an earlier save of this launch counts likewise.  DistributedDataParallel keeps
        values equal in its group: more ranks than that are on several, such as those of pipeline stages.
        """
        if not divided.every_rank:
            return
        ranks = ",".join(map(str, divided.ranks[:RANKS_REPORTED_MAX]))
        were_equal = self._state.parameter_keys if self._saver.committed else frozenset()
        sizes = self._state.replicated
        held = zip(divided.names, divided.holders, strict=True)
        equal_in_group = {name for name, holders in held if holders <= sizes.get(name, 0)}
        typed = sorted(set(divided.names) & (equal_in_group | set(divided.sharded) | were_equal))
        others = sorted(set(divided.names) - set(typed))
        if typed:
            self._state.drifted = sorted({*self._state.drifted, *typed})
            why = "ranks that must hold the same tensor hold other bytes: a device may compute wrongly; both are saved"
            warn(
                "replicas_differ",
                step=self._state.counters.step,
                tensors=shorten(", ".join(typed)),
                ranks=ranks,
                why=why,
            )
        if others:
            say("kept_for_each_rank", step=self._state.counters.step, names=shorten(", ".join(others)), ranks=ranks)

    def _make_up(self, failed: int) -> None:
        """Have the end of an epoch saved by the next save, where its own came to nothing."""
        if failed != self._epoch_save or self._made_up >= MAKE_UP_MAX:
            return
        self._epoch_save, self._making_up = 0, True
        self._made_up += 1
        self._periodic.make_up_epoch_end()
        say("epoch_end_made_up", step=self._state.counters.step, why="its own save came to nothing")

    def _say_held(self) -> None:
        if not self._held_said:
            say("save_waits", step=self._state.counters.step, why="the storage has failed: it is given time")
        self._held_said = True

    def _say_busy(self) -> None:
        if self._waits_said != self._saver.sequence:
            saver = self._saver
            prepares = "the ranks compare their values" if saver.compares else "the memory for it is being made"
            why = "another is in flight" if saver.busy or (saver.sequence and not saver.compares) else prepares
            say("save_waits", step=self._state.counters.step, why=why)
        self._waits_said = self._saver.sequence

    def _take_over(self) -> None:
        """Give up the save in flight for an urgent one, if there is not time for both."""
        deadline_at = self._requests.deadline_at
        now = time.time()
        if deadline_at is None:
            return
        mine = [*self._saver.estimate_ms(now), -int(1000 * (deadline_at - now))]
        in_flight_ms, new_ms, left_ms = self.agreement.settle(Call.TAKE_OVER, mine)
        if take_over(left_s=-left_ms / 1000, in_flight_s=in_flight_ms / 1000, new_s=new_ms / 1000):
            self._saver.cancel(f"no time for it and the save of step {self._state.counters.step}")

    def _renew(self, broken: bool) -> None:  # noqa: FBT001
        """Make the saves a new group where theirs has failed; all ranks do, having agreed that it has."""
        if broken and self.group is not None:
            self.group = groups.new_group(self._save_within_s)
            self._saver.renew(self.group)

    def _begin(
        self,
        collect: Callable[[], dict[str, torch.Tensor]],
        *,
        sequence: int,
        ask_room: bool,
        emergency: bool = False,
        snapshot: bool = False,
    ) -> None:
        with (
            collection_paused()
        ):  # Python must not look for cycles among all objects of the script while training waits
            self._settle()  # the state and the manifest tell of this step's loss
            counters = self._state.counters
            loss = counters.last_loss
            tensors, problem = _try(collect)
            self._held_said = self._held_said and snapshot
            if self._periodic.epoch_end:
                self._made_up = self._made_up if self._making_up else 0
                self._epoch_save, self._making_up = sequence, False
            self._saver.start(
                tensors,
                Summary(
                    step=counters.step,
                    tokens=counters.tokens,
                    loss=loss if loss is not None and math.isfinite(loss) else None,
                    parts=self._state.summary(),
                    metrics={name: value for name, value in self._metrics.items() if math.isfinite(value)},
                    epoch_end=self._periodic.epoch_end,
                ),
                sequence=sequence,
                emergency=emergency,
                ask_room=ask_room,
                requested_at=self._requests.asked_at if not snapshot else None,
                deadline_at=self._requests.deadline_at,
                early=self._state.early(tensors) if self._saver.overlap_copies else frozenset(),
                problem=problem,
                snapshot=snapshot,
            )
        self._unsaid_save = True
        self._snapshots.begun(counters.step)
        if snapshot:
            return
        self._periodic.begun(counters.step)
        self._requests.served()


def _try(collect: Callable[[], dict[str, torch.Tensor]]) -> tuple[dict[str, torch.Tensor], StepkeeperError | None]:
    """Return the state, or why this rank has none just now: that fails the save on all ranks, and not training."""
    try:
        return collect(), None
    except StepkeeperError as error:
        return {}, error


def take_over(*, left_s: float, in_flight_s: float, new_s: float) -> bool:
    """Say whether an emergency save gives up the one in flight: when there is time for the newer state only.

    Args:
        left_s: until the deadline.
        in_flight_s: that the one in flight still needs, by the slowest rank's estimate.
        new_s: that a new one needs.

    >>> take_over(left_s=100, in_flight_s=20, new_s=30)  # both fit
    False
    >>> take_over(left_s=50, in_flight_s=25, new_s=30)
    True
    >>> take_over(left_s=35, in_flight_s=25, new_s=30)  # the new one may well be too late: keep what is nearly there
    False
    """
    return in_flight_s + new_s > left_s >= SURE_FACTOR * new_s
