"""How ranks agree: messages of one size, reduced by MAX over a gloo group of their own.

What is said at the boundary of one step is read at the next, so nobody waits; all ranks read the same, so all save and
stop at the same step.  To start an all-reduce takes longer than all else of it, so a thread does that.  Each message
says which method its rank is in: ranks that call different methods get an error that names them, and never wait for
each other.  A process alone agrees with itself at once.
"""

from __future__ import annotations

import time
from array import array
from dataclasses import dataclass, field
from enum import IntEnum
from functools import partial
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist

from stepkeeper_trainer.coordinate.groups import wait
from stepkeeper_trainer.errors import LateError, RankEndedError, StepkeeperError, UsageError
from stepkeeper_trainer.worker import Worker

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from stepkeeper_trainer.coordinate.groups import Group

PAYLOAD = 13  # numbers in a message, behind the calls
LOOK_EVERY_S = 1.0  # a wait returns to Python so often: its signal handlers run
STARTED_WITHIN_S = 10.0  # an all-reduce, for which nobody else is needed
ALL_SAID_WITHIN_S = 2.0  # their last words, as they leave together
MISSING_WITHIN_S = 2.0  # ranks that wait tell each other so within it
RANKS_NAMED_MAX = 16
_NO_DEADLINE = -(1 << 62)


class Want(IntEnum):
    """What a rank was asked for; the larger one wins."""

    NOTHING = 0
    SNAPSHOT = 1  # one in memory, by rank 0's clock
    DUE = 2  # a periodic save, by rank 0's clock
    SAVE = 3
    STOP = 4


class Call(IntEnum):
    """Which method of the manager a rank is in."""

    START = 0
    STEP = 1
    SAVE = 2
    FINISH = 3
    NOTICE = 4  # in the thread that answers notices between steps
    BEGIN = 5  # a save that is waited for, in a step
    TAKE_OVER = 6  # whether that save takes the place of the one in flight
    EVALUATION = 7  # between two batches of an evaluation
    CONFIRM = 8  # in a step, of which the first micro-batch is computed again

    @property
    def method(self) -> str:
        """What a script calls."""
        return (
            "the constructor or resume()",
            "step_done()",
            "save()",
            "finish()",
            "a save between steps",
            "step_done(), in a save",
            "step_done(), before a save",
            "an evaluation",
            "confirm()",
        )[self]


CALLS = 2 * len(Call)
"""Numbers that a message begins with: the highest and the lowest rank in each method."""


@dataclass(frozen=True, slots=True)
class Message:
    """What a rank says, until it is what all say."""

    call: Call
    started: SimpleQueue[Any] = field(default_factory=SimpleQueue)
    """The numbers that are reduced in place, and torch's work, None where it is complete; or why there are none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """What one rank knows, and what all know together: reduced by MAX, deadlines to the earliest."""

    want: Want = Want.NOTHING
    deadline_at: float | None = None  # Unix seconds
    request_id: int = 0
    busy: bool = False  # a save is in flight
    failed_save: int = 0  # sequence number of a save that came to nothing on this rank
    sequence: int = 0  # of the newest save that was begun
    broken: bool = False  # the group that saves use has failed on this rank, or its attachment has
    committed: int = 0  # sequence number of the newest commit (rank 0 knows)
    held: bool = False  # periodic saves wait: storage has failed on this rank
    drifted: bool = False  # ranks hold different values under one name, and it is not known which (rank 0)
    divided: bool = False  # it is known, and not yet in force
    no_snapshot: bool = False  # some node can take none now
    too_dear: bool = False  # taking the state down after each step costs some rank too much

    def pack(self) -> list[int]:
        """Return the integers to reduce."""
        deadline = _NO_DEADLINE if self.deadline_at is None else -int(self.deadline_at * 1000)
        return [
            int(self.want),
            deadline,
            self.request_id,
            int(self.busy),
            self.failed_save,
            self.sequence,
            int(self.broken),
            self.committed,
            int(self.held),
            int(self.drifted),
            int(self.divided),
            int(self.no_snapshot),
            int(self.too_dear),
        ]

    @staticmethod
    def unpack(values: Sequence[int]) -> Proposal:
        """Read reduced integers."""
        want, deadline, request_id, busy, failed_save, sequence, broken, committed, *flags = values
        held, drifted, divided, no_snapshot, too_dear = flags
        return Proposal(
            want=Want(want),
            deadline_at=None if deadline == _NO_DEADLINE else -deadline / 1000,
            request_id=request_id,
            busy=bool(busy),
            failed_save=failed_save,
            sequence=sequence,
            broken=bool(broken),
            committed=committed,
            held=bool(held),
            drifted=bool(drifted),
            divided=bool(divided),
            no_snapshot=bool(no_snapshot),
            too_dear=bool(too_dear),
        )


class Agreement:
    """One message in flight at a time."""

    def __init__(self, group: Group | None, *, within_s: float) -> None:
        """Take a group of all ranks; None for a process alone.  Others are waited for up to `within_s` seconds."""
        self._group = group
        self.within_s = within_s
        self._rank = group.rank if group is not None else 0
        self._world_size = group.size if group is not None else 1
        self._starter = Worker("stepkeeper-agreement")  # in the order of the messages
        self._newest: Any = None  # torch's work of the newest message, where it was started and not complete
        self._count = 0  # of messages: the same on all ranks
        self._pending: Message | None = None
        self._left: object = None
        self._usual: tuple[array[int], Proposal] | None = None  # what was read last: most steps say the same

    @property
    def group(self) -> Group | None:
        """The group, for what has tags of its own; `idle_group` is for collectives."""
        return self._group

    @property
    def idle_group(self) -> Group | None:
        """The group, for collectives of the main thread, once those of all messages before are started.

        Raises:
            LateError: they are not; with more than 32 ranks one that did not come is enough.
        """
        if self._group is not None and not self._starter.wait(self.within_s):
            raise LateError(f"a rank's message did not come within {self.within_s:.0f} s: look at the ranks' stacks")
        return self._group

    def read(self, own: Callable[[], Proposal], *, within_s: float | None = None) -> Proposal:
        """Return what all ranks said at the boundary before; alone, what this one says now: its `own`.

        Raises:
            UsageError: another rank has called another method there.
            LateError: another rank did not come.
            RankEndedError: another rank ended.
        """
        if self._group is None:
            return own()
        if self._pending is None:
            return Proposal()
        pending, self._pending = self._pending, None
        numbers = self._receive(pending, self.within_s if within_s is None else within_s)
        if self._usual is None or numbers != self._usual[0]:
            self._check_calls(numbers)
            self._usual = numbers, Proposal.unpack(numbers[CALLS : CALLS + PAYLOAD])
        return self._usual[1]

    def issue(self, own: Proposal, call: Call = Call.STEP) -> None:
        """Say what this rank knows at the end of a step; nobody waits."""
        if self._group is None:
            return
        assert self._pending is None, "the answer before was not read"
        self._pending = self._send(call, own.pack)

    def leave(self, own: Proposal) -> None:
        """Say a last word in place of the next one, whether or not the one before was read; nobody waits."""
        if self._group is not None:
            self._left = self._pending, self._send(Call.STEP, own.pack)  # what is on its way must stay
            self._pending = None

    def settle(self, call: Call, values: Sequence[int], *, within_s: float | None = None) -> list[int]:
        """Return the largest of each value of all ranks, waiting for them: not at an ordinary step.

        Raises:
            UsageError: another rank has called another method.
            LateError: another rank did not come within `within_s` seconds.
            RankEndedError: another rank ended.
        """
        if self._group is None:
            return list(values)
        numbers = self._receive(self._send(call, lambda: values), self.within_s if within_s is None else within_s)
        self._check_calls(numbers)
        return list(numbers[CALLS : CALLS + len(values)])

    def check_alike(self, **settings: object) -> None:
        """Refuse what ranks must have alike, and have not; all ranks call it.  Raises UsageError."""
        every_rank = self.gather(settings)
        for name in settings:
            others = [rank for rank, each in enumerate(every_rank) if each[name] != every_rank[0][name]]
            if others:
                raise UsageError(
                    f"{name} is {every_rank[0][name]} on rank 0 and {every_rank[others[0]][name]} on rank {others[0]}: "
                    "give all ranks the same, by arguments and environment"
                )

    def raise_together(self, own: StepkeeperError | None, call: Call = Call.START) -> None:
        """Raise on all ranks what any of them has found: one that ends alone keeps the others waiting.

        Raises:
            StepkeeperError: that of the lowest rank that has one, in the same words on all ranks.
        """
        if self._group is None:
            if own is not None:
                raise own
            return
        [wrong] = self.settle(call, [int(own is not None)])
        if not wrong:
            return
        everyone = self._group.all_gather((type(own), str(own)) if own is not None else None)
        rank = next(rank for rank, found in enumerate(everyone) if found is not None)
        kind, text = everyone[rank]
        raise kind(f"rank {rank}: {text}") from own

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's `value` on every rank (at start-up)."""
        if self._group is None:
            return [value]
        self.settle(Call.START, [])
        return self._group.all_gather(value)

    def share(self, value: Any) -> Any:
        """Return rank 0's `value` on every rank (at start-up)."""
        if self._group is None:
            return value
        self.settle(Call.START, [])
        return self._group.broadcast(value)

    def close(self) -> None:
        """End the group, once all ranks have said their last word.

        It stays where that is late: torch waits for the others while a group ends.
        """
        group, self._group = self._group, None
        if group is None or not (self._starter.wait(STARTED_WITHIN_S) or self._starter.has_left):
            return
        if self._newest is None or _is_through(self._newest):
            group.close()

    def _send(self, call: Call, pack: Callable[[], Sequence[int]]) -> Message:
        """Begin to reduce a message; nobody waits."""
        assert self._group is not None
        self._count += 1
        message = Message(call)
        self._starter.do(partial(self._start, message, pack, self._group))
        return message

    def _start(self, message: Message, pack: Callable[[], Sequence[int]], group: Group) -> None:
        """Say for each method the highest and the lowest rank that is in it, then the values."""
        try:
            values = array("q", pack())
            numbers = array("q", bytes(8 * (CALLS + PAYLOAD)))
            call = message.call
            numbers[2 * call], numbers[2 * call + 1] = self._rank + 1, self._world_size - self._rank
            numbers[CALLS : CALLS + len(values)] = values
            tensor = torch.frombuffer(numbers, dtype=torch.int64)
            self._newest = work = group.start_reduce_max(tensor, lambda: not self._starter.leaving)
            message.started.put((numbers, work))
        except Exception as error:  # noqa: BLE001  # the main thread raises it
            message.started.put((None, error))

    def _receive(self, message: Message, within_s: float) -> array[int]:
        limit_at = time.monotonic() + within_s
        while (found := _started(message, limit_at - time.monotonic())) is None:
            self._check_late(message, limit_at, within_s)
        numbers, work = found
        if isinstance(work, RuntimeError):
            raise _ended(message.call, work) from work
        if isinstance(work, Exception):
            raise work
        while work is not None and not _wait(work, limit_at - time.monotonic(), message.call):
            self._check_late(message, limit_at, within_s)
        return cast("array[int]", numbers)

    def _check_late(self, message: Message, limit_at: float, within_s: float) -> None:
        if time.monotonic() >= limit_at:
            raise LateError(
                f"{self._missing()} did not come to {message.call.method} within {within_s:.0f} s: "
                "look at what they do (their stacks), and at whether each rank does as many steps"
            )

    def _check_calls(self, numbers: array[int]) -> None:
        """Raise where ranks are in different methods; all of them see the same numbers."""
        ranks = {
            call: (self._world_size - numbers[2 * call + 1], numbers[2 * call] - 1)
            for call in Call
            if numbers[2 * call]
        }
        if len(ranks) == 1:
            return
        who = "; ".join(f"{call.method} on {_between(*bounds)}" for call, bounds in ranks.items())
        raise UsageError(
            f"the ranks call different methods of the CheckpointManager: {who}.  "
            "All ranks must do as many steps, and leave the loop after the same one"
        )

    def _missing(self) -> str:
        """Name the ranks that do not wait: those that wait say so in the store of the job."""
        try:
            store = dist.distributed_c10d._get_default_store()  # noqa: SLF001  # torch has no public name for it
            prefix = f"{self._group.name if self._group is not None else ''}/waits/{self._count}"
            store.set(f"{prefix}/{self._rank}", "")
            time.sleep(MISSING_WITHIN_S)
            missing = [rank for rank in range(self._world_size) if not store.check([f"{prefix}/{rank}"])]
        except RuntimeError:  # rank 0, which has the store, is gone
            return "another rank"
        named = ", ".join(map(str, missing[:RANKS_NAMED_MAX]))
        return f"rank {named}" if len(missing) == 1 else f"ranks {named}" if missing else "a rank that comes now"


def _between(first: int, last: int) -> str:
    return f"rank {first}" if first == last else f"ranks {first} to {last}"


def _started(message: Message, seconds: float) -> tuple[array[int] | None, Any] | None:
    """Return what the thread has made of a message; None while it has not.

    With more than one level of groups, the thread waits for all ranks.
    """
    try:
        found: tuple[array[int] | None, Any] = message.started.get(timeout=_slice(seconds))
    except Empty:
        return None
    return found


def _slice(seconds: float) -> float:
    return min(LOOK_EVERY_S, max(0.001, seconds))


def _wait(work: Any, seconds: float, call: Call) -> bool:
    """Wait for a collective; false while it is not complete.  Raises RankEndedError."""
    try:
        return wait(work, _slice(seconds))
    except RuntimeError as error:
        raise _ended(call, error) from error


def _is_through(work: Any) -> bool:
    try:
        return wait(work, ALL_SAID_WITHIN_S)
    except RuntimeError:  # a rank has ended: nobody is waited for
        return True


def _ended(call: Call, error: RuntimeError) -> RankEndedError:
    return RankEndedError(
        f"another rank ended while this one waited for it in {call.method}: its own last lines say why; "
        f"gloo says: {str(error).partition('. This is')[0]}"
    )
