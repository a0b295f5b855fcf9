"""How to go on with a run that does not do so by itself: what to mend, and what to type."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

import msgspec

from stepkeeper.core.causes import Cause
from stepkeeper.core.exits import ExitCode
from stepkeeper.seeing.model import Checkpoint
from stepkeeper.seeing.timeline import Standing, Timeline
from stepkeeper.verdict import rules
from stepkeeper_trainer.formats.steps import DAMAGED

_OUT = {DAMAGED, "pruned", "gone", "rolled back"}
_BY_CAUSE = frozenset((ExitCode.TRAINING_FAILED, ExitCode.TRAINING_GAVE_UP, ExitCode.CAUSE_STAYS, ExitCode.NODES_LOST))


class Advice(msgspec.Struct, frozen=True):
    """One thing to do."""

    say: str
    type: str = ""  # a command line, where there is one


def advice(seen: Timeline, path: str) -> list[Advice]:
    """Return what to do, in its order; nothing where the run goes on, or is finished."""
    job = seen.attempts[-1].job_id if seen.attempts else 0
    if seen.standing is Standing.SILENT:
        return [
            Advice("See whether the job is there, or suspended:", f"squeue --jobs={job}"),
            _again(seen, path),
        ]
    if seen.standing is not Standing.ENDED:
        return []
    return [*_mend(seen, path), _again(seen, path)]


def _mend(seen: Timeline, path: str) -> list[Advice]:
    """Say what has to change first."""
    code = next((each for each in ExitCode if each == seen.exit_code), None)
    last = next((each for each in reversed(list(seen.launches())) if each.cause), None)
    if code in _BY_CAUSE and last is not None and last.cause in set(Cause):
        meaning = rules.load().meanings[Cause(last.cause)]
        return [
            Advice(f"{meaning.happened} {meaning.todo}"),
            Advice("What the rank that failed first printed last:", f"stepkeeper logs {shlex.quote(path)} --failed"),
        ]
    return [Advice(f"Mend this first: {code.meaning}.")] if code is not None and code.needs_person else []


def _again(seen: Timeline, path: str) -> Advice:
    newest = _newest(seen.checkpoints)
    where = (
        f"step {newest.step:,} ({newest.states[0]})" if newest is not None else "the beginning: no step was committed"
    )
    return Advice(f"Submit it again as it was. It goes on from {where}.", f"stepkeeper resume {shlex.quote(path)}")


def _newest(found: Sequence[Checkpoint]) -> Checkpoint | None:
    usable = [each for each in found if not _OUT.intersection(each.states)]
    return usable[-1] if usable else None
