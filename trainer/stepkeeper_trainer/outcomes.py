"""How a launch ends: the last save, the last words, and all ranks leaving together."""

from __future__ import annotations

import time
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING

from stepkeeper_trainer.errors import SaveError
from stepkeeper_trainer.formats import outcome
from stepkeeper_trainer.formats.messages import Finished, Stopped
from stepkeeper_trainer.log import say, warn
from stepkeeper_trainer.rollcall import RollCall

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from stepkeeper_trainer.agreement import Agreement
    from stepkeeper_trainer.link import Link
    from stepkeeper_trainer.saver import Saver

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


@dataclass(frozen=True, slots=True)
class _Together:
    """How the ranks end together."""

    agreement: Agreement
    roll: RollCall  # finds out which of them have ended


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

    Args:
        ending: what to say.
        saver: knows of saves in flight.
        saved: step and save_id that this launch resumed from.
        begin_save: saves the state as it is, on all ranks or none: false where one is busy until the given time.
        agreement: brings the ranks together.
        link: to the supervisor.
        when_saved: what follows the last save of finished work, before that is said; by a time in Unix seconds.

    Raises:
        SaveError: the work is finished, and its last step could not be saved.
    """
    roll = RollCall(agreement.group, saver.ended)
    problem = _save(ending, saver, saved, begin_save, _Together(agreement, roll))
    roll.close()
    saved_here, save_id = problem is None, None
    if saved_here:
        last = saver.last
        save_id = last.save_id if last is not None else saved[1] if saved is not None else None
    if not saved_here and not ending.stopping:
        raise SaveError(f"the last step ({ending.step}) could not be saved: {problem}")
    if not ending.stopping:
        when_saved(ending.limit_at)
    if ending.rank == 0:
        _last_words(ending, save_id, link)
    try:
        agreement.settle(0, within_s=TOGETHER_WITHIN_S)
    except RuntimeError as error:
        warn("left_alone", why=str(error).splitlines()[0])  # another rank died: nothing is lost by that
    if not ending.stopping:
        return outcome.EXIT_FINISHED
    return outcome.EXIT_STOPPED if saved_here else EXIT_UNSAVED


def _save(
    ending: Ending,
    saver: Saver,
    saved: tuple[int, str] | None,
    begin_save: Callable[[float], bool],
    ranks: _Together,
) -> str | None:
    """Bring the step at hand to disk; say why it is not there, as far as this rank can know."""
    here = saver.last.summary.step if saver.last is not None else saved[0] if saved is not None else None
    ok = saver.wait_shared(ending.limit_at, ranks.roll)  # the one in flight, of this step or an older one
    problem = "not in time"
    for attempt in range(SAVE_ATTEMPTS_MAX):
        if attempt or here != ending.step:  # the same on all ranks: they count and agree alike
            try:
                ok = begin_save(ending.limit_at) and saver.wait_shared(ending.limit_at, ranks.roll)
            except RuntimeError as error:
                warn("rank_lost", why=str(error).splitlines()[0])
                ok = False
        problem = saver.problem or problem
        try:
            verdict = _all_agree(_judge(ok, attempt, ending), ending, ranks.agreement, lost=bool(saver.ended))
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
    return _Verdict(agreement.settle(int(own), within_s=left_s + TOGETHER_WITHIN_S))


def _last_words(ending: Ending, save_id: str | None, link: Link) -> None:
    word = "stopped" if ending.stopping else "finished"
    try:
        outcome.write(
            ending.run_directory,
            outcome.Outcome(
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
