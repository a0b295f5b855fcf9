"""How a launch ends: the last save, the last words, and all ranks leaving together.

Which ranks have ended while the last save is waited for: rank 0 then need not wait for what they never wrote.

Each rank says a word when it is through with its part, and all words are asked for before anybody waits.  The kernel
closes the connections of a process that dies, so what was asked of it fails at once.  A node without power closes
nothing: `connections` finds that its kernel is silent.  A process that stands still is no dead one, its kernel answers
for it: there the limit of the save counts.

Leaving the process comes after flushing, without waiting for threads.  A stuck save would block the exit; and torch's
own threads abort a process that ends in the ordinary way now and then (SIGABRT, "terminate called without an active
exception", in 3 of 50 exits after collectives over gloo in torch 2.13): a thread that lets its last tensor go asks for
an interpreter that is gone.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from enum import IntEnum
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from stepkeeper_trainer.coordinate import connections
from stepkeeper_trainer.coordinate.agreement import Call
from stepkeeper_trainer.errors import SaveError, StepkeeperError
from stepkeeper_trainer.formats import records
from stepkeeper_trainer.formats.messages import Finished, Stopped
from stepkeeper_trainer.log import say, warn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path
    from types import TracebackType

    from stepkeeper_trainer.coordinate.agreement import Agreement
    from stepkeeper_trainer.coordinate.groups import Group, Level
    from stepkeeper_trainer.link import Link
    from stepkeeper_trainer.save.saver import Saver


EXIT_UNSAVED = 1
SAVE_ATTEMPTS_MAX = 3
RETRY_AFTER_S = 1.0
TOGETHER_WITHIN_S = 10.0  # ranks wait so long for each other once the outcome is known
LAST_WORDS_WITHIN_S = 1.0


class _Verdict(IntEnum):
    """On the last save; the larger one wins."""

    SAVED = 0
    RETRY = 1
    GIVE_UP = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """What a launch ends with."""

    run_directory: Path
    launch: str
    rank: int
    step: int
    tokens: int
    stopping: bool  # asked to; else the work is finished
    limit_at: float  # Unix seconds


def conclude(
    ending: Ending,
    *,
    saver: Saver,
    saved: tuple[int, str] | None,
    begin_save: Callable[[float], bool],
    agreement: Agreement,
    link: Link,
    when_saved: Callable[[float], object] = lambda _limit_at: None,
) -> int:
    """Return the exit code, when the last step is committed or its limit has passed.

    `begin_save` saves the state as it is, on all ranks or none: false where one is busy until the given time.
    `when_saved` is what follows the last save of finished work, before that is said; by a time in Unix seconds.

    Raises:
        SaveError: the work is finished, and its last step could not be saved.
    """
    roll = RollCall(agreement.group, saver.ended)
    problem = _save(ending, saver, saved, begin_save, agreement=agreement, roll=roll)
    roll.close()
    saved_here, save_id = problem is None, None
    if saved_here:
        last = saver.last_save
        save_id = last.save_id if last is not None else saved[1] if saved is not None else None
    if not saved_here and not ending.stopping:
        raise SaveError(f"the last step ({ending.step}) could not be saved: {problem}")
    if not ending.stopping:
        when_saved(ending.limit_at)
    if ending.rank == 0:
        last_words(ending, save_id, link)
    try:
        agreement.settle(Call.FINISH, [], within_s=TOGETHER_WITHIN_S)
    except RuntimeError as error:
        warn("left_alone", why=str(error).splitlines()[0])  # another rank died: nothing is lost by that
    if not ending.stopping:
        return records.EXIT_FINISHED
    return records.EXIT_STOPPED if saved_here else EXIT_UNSAVED


def _save(
    ending: Ending,
    saver: Saver,
    saved: tuple[int, str] | None,
    begin_save: Callable[[float], bool],
    *,
    agreement: Agreement,
    roll: RollCall,
) -> str | None:
    """Bring the step at hand to disk; say why it is not there, as far as this rank can know."""
    last = saver.last_save
    here = last.summary.step if last is not None else saved[0] if saved is not None else None
    ok = saver.wait_shared(ending.limit_at, roll)  # the one in flight, of this step or an older one
    problem = "not in time"
    for attempt in range(SAVE_ATTEMPTS_MAX):
        if attempt or here != ending.step:  # the same on all ranks: they count and agree alike
            try:
                ok = begin_save(ending.limit_at) and saver.wait_shared(ending.limit_at, roll)
            except RuntimeError as error:
                warn("rank_lost", why=str(error).splitlines()[0])
                ok = False
        problem = saver.problem or problem
        try:
            verdict = _all_agree(_judge(ok, attempt, ending), ending, agreement, lost=bool(saver.ended))
        except RuntimeError as error:
            warn("rank_lost", why=str(error).splitlines()[0])
            if ok and ending.rank == 0:
                return None  # its word counts: it has committed
            return "another rank ended" if ok else problem
        if verdict is not _Verdict.RETRY:
            return None if verdict is _Verdict.SAVED else problem
        time.sleep(RETRY_AFTER_S)
    return problem


def _judge(ok: bool, attempt: int, ending: Ending) -> _Verdict:  # noqa: FBT001
    if ok:
        return _Verdict.SAVED
    late = time.time() + RETRY_AFTER_S >= ending.limit_at
    return _Verdict.GIVE_UP if late or attempt + 1 == SAVE_ATTEMPTS_MAX else _Verdict.RETRY


def _all_agree(own: _Verdict, ending: Ending, agreement: Agreement, *, lost: bool) -> _Verdict:
    """Return what the ranks make of it together; where one is `lost`, the others are not waited for long.

    Raises:
        RuntimeError: another rank ended, or did not come.
    """
    left_s = 0.0 if lost else max(0.0, ending.limit_at - time.time())
    return _Verdict(agreement.settle(Call.FINISH, [int(own)], within_s=left_s + TOGETHER_WITHIN_S)[0])


def last_words(ending: Ending, save_id: str | None, link: Link) -> None:
    """Record the outcome, and say it (rank 0)."""
    word = "stopped" if ending.stopping else "finished"
    try:
        records.write_outcome(
            ending.run_directory,
            records.Outcome(
                outcome="stopped" if ending.stopping else "finished",
                step=ending.step,
                tokens=ending.tokens,
                save_id=save_id,
                launch=ending.launch,
                at=time.time(),
            ),
        )
    except OSError as error:
        warn("outcome_unwritten", why=error)  # the socket and the exit code still say it
    say(word, step=ending.step, save_id=save_id)
    if ending.stopping:
        link.send(Stopped(step=ending.step, save_id=save_id), keep=True)
    else:
        link.send(Finished(step=ending.step), keep=True)
    link.flush(LAST_WORDS_WITHIN_S)


GRACE_S = 10.0  # what a rank wrote right before it ended may be seen here so much later, on shared storage
LATE_S = 60.0  # words are waited for so much longer than what they tell of: a limit that passes fails the group
JOIN_WITHIN_S = 5.0
_TAG = 7_000_000  # of the first words; nothing else on the group has tags


class Ended:
    """The ranks that are known to have ended, and since when."""

    def __init__(self) -> None:
        self._since: dict[int, float] = {}  # time.monotonic()

    def note(self, rank: int) -> None:
        """Take note that a rank's process is gone."""
        self._since.setdefault(rank, time.monotonic())

    def __bool__(self) -> bool:
        return bool(self._since)

    @property
    def known(self) -> frozenset[int]:
        """The ranks."""
        return frozenset(self._since)

    def of(self, ranks: Iterable[int]) -> list[int]:
        """Return which of these ended long enough ago for all that they wrote to be seen."""
        until = time.monotonic() - GRACE_S
        return sorted(rank for rank in ranks if self._since.get(rank, float("inf")) <= until)


class RollCall:
    """Of one launch's end.  All ranks hold it equally often, each around a wait for the save.

    A rank speaks to the first rank of its gloo group, which speaks for all of it once it has heard them.  A word has
    one number for each rank that the speaker stands for: 0, or 1 where that rank has ended.
    """

    def __init__(self, group: Group | None, ended: Ended) -> None:
        """Take the group that the ranks agree by; None for a process alone.  `ended` hears who is gone."""
        self._group, self._ended = group, ended
        self._calls = 0
        self._sent: list[Any] = []  # what is on its way must stay
        self._threads: list[threading.Thread] = []

    @contextmanager
    def held(self, limit_at: float) -> Iterator[None]:
        """Hear meanwhile who has ended; say at the end that this rank has not."""
        tag = _TAG + self._calls
        self._calls += 1
        if self._group is None:
            yield
            return
        connections.probe()
        heard = [level for level in self._group.levels if level.leads]
        told = next((level for level in self._group.levels if not level.leads), None)
        asked = [each for level in heard for each in self._ask(level, tag)]
        through = threading.Event()  # this rank is, with its own part
        thread = threading.Thread(
            target=self._listen, args=(asked, told, tag, limit_at, through), name="stepkeeper-rollcall", daemon=True
        )
        if asked:
            self._threads.append(thread)
            thread.start()
        try:
            yield
        finally:
            through.set()
            if not asked and told is not None:
                self._say(told, tag)

    def close(self) -> None:
        """Wait for what hears, so that it does not outlive the group; a rank that stands still is not waited for."""
        limit_at = time.monotonic() + JOIN_WITHIN_S
        for thread in self._threads:
            thread.join(max(0.0, limit_at - time.monotonic()))

    def _ask(self, level: Level, tag: int) -> Iterator[tuple[int, Any, torch.Tensor]]:
        """Ask each other rank of a gloo group for its word; yield the rank, torch's work, and the word to be."""
        for index, rank in enumerate(level.block[1:], 1):
            word = torch.zeros(level.behind(rank), dtype=torch.uint8)
            try:
                yield rank, level.start_hearing(index, word, tag), word
            except RuntimeError as error:
                self._note_end(rank, error)

    def _listen(
        self,
        asked: list[tuple[int, Any, torch.Tensor]],
        told: Level | None,
        tag: int,
        limit_at: float,
        through: threading.Event,
    ) -> None:
        """Wait for one after the other: a rank that is gone is found when those before it have had their say."""
        for rank, work, word in asked:
            left_s = limit_at + LATE_S - time.time()
            if left_s <= 0:
                return
            try:
                work.wait(timedelta(seconds=left_s))
            except RuntimeError as error:
                if time.time() >= limit_at + LATE_S:
                    return  # it may be alive
                self._note_end(rank, error)
            else:
                for behind in word.nonzero().flatten().tolist():
                    self._ended.note(rank + behind)
        if told is not None and through.wait(max(0.0, limit_at + LATE_S - time.time())):
            self._say(told, tag)

    def _note_end(self, rank: int, error: RuntimeError) -> None:
        self._ended.note(rank)
        warn("rank_lost", rank=rank, why=str(error).splitlines()[0])

    def _say(self, level: Level, tag: int) -> None:
        """Say which of the ranks that this one stands for have ended."""
        own = level.block[level.gloo.rank()]
        gone = self._ended.known
        word = torch.tensor([int(own + behind in gone) for behind in range(level.behind(own))], dtype=torch.uint8)
        try:
            self._sent.append((level.start_saying(word, tag), word))
        except RuntimeError as error:
            warn("rank_lost", rank=level.block[0], why=str(error).splitlines()[0])


EXIT_INTERRUPTED = 130


def leave(code: int) -> NoReturn:
    """Flush what was said, and end the process at once."""
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # nobody listens any more: that must not keep us
            stream.flush()
    os._exit(code)


def install_excepthook(last_act: Callable[[], None]) -> None:
    """Make an uncaught exception end the process: an error of ours without a traceback, with its exit code.

    `last_act` comes between: it may give a save in flight its last seconds.
    """
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        code = 1
        if isinstance(error, StepkeeperError):
            code = error.exit_code
            print(f"stepkeeper_trainer: error: {error}", file=sys.stderr)  # noqa: T201
        else:
            before(kind, error, traceback)
            if issubclass(kind, KeyboardInterrupt):
                code = EXIT_INTERRUPTED
        try:
            last_act()
        finally:
            leave(code)

    sys.excepthook = hook
