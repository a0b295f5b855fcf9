"""What lies between a killed rank and the next new step under Stepkeeper, piece by piece, from the run's journal."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from stepkeeper.core import effects as do
from stepkeeper.core import events as on
from stepkeeper.run_store import journal
from tests.recovery.playing import Step

SEEN = "rank killed to failure known, s"
STOPPED = "failure known to the Slurm step's end, s"
CHOSEN = "  its end to the newest step directory verified, s"
JUDGED = "  its end to the verdict, s (at the same time)"
ASKED = "the Slurm step's end to the nodes asked to be clear, s"
CLEARED = "nodes asked to the next launch, s"
TASKS = "next launch to its tasks run (Slurm), s"
SUM = "**Slurm and Stepkeeper: rank killed to the next tasks run, s** (target: under 1)"
HELLO = "tasks run to the trainer library's first word (imports of Python and torch), s"
LOADED = "first word to the first step done (ranks meet, load, step), s"
REDONE = "first step done to the first new one, s"
SHARE = "tasks run to the first word, of the time from the kill to the first new step, %"


def pieces(path: Path, struck_at: float, told: Iterable[Step]) -> dict[str, float]:
    """Return the pieces of the first relaunch.

    Args:
        path: the journal.
        struck_at: when the rank was killed.
        told: what rank 0 told of its steps.
    """
    records = list(journal.read(path))

    def first(kind: type, launch: int, after: float = struck_at) -> float:
        return next(
            record.event.at
            for record in records
            if isinstance(record.event, kind) and record.launch == launch and record.event.at >= after
        )

    def ordered(kind: type) -> float:
        return next(
            record.event.at
            for record in records
            if record.event.at >= struck_at and any(isinstance(effect, kind) for effect in record.effects)
        )

    seen = first(on.RankExited, 0)
    # the record of an event bears the launch that it leads to
    ended = next(r.event.at for r in records if isinstance(r.event, on.LaunchEnded) and r.event.launch == 0)
    chosen, judged = (first(kind, 1, ended) for kind in (on.CheckpointChosen, on.Judged))
    asked, started = ordered(do.ClearNodes), ordered(do.StartLaunch)
    began, hello = first(on.LaunchBegan, 1), first(on.RankHello, 1)
    told = list(told)
    furthest = max(step.number for step in told if step.at <= struck_at)
    again = [step for step in told if step.at > started]
    new = next(step for step in again if step.number > furthest)
    return {
        SEEN: seen - struck_at,
        STOPPED: ended - seen,
        CHOSEN: chosen - ended,
        JUDGED: judged - ended,
        ASKED: asked - ended,
        CLEARED: started - asked,
        TASKS: began - started,
        SUM: began - struck_at,
        HELLO: hello - began,
        LOADED: again[0].at - hello,
        REDONE: new.at - again[0].at,
        SHARE: 100 * (hello - began) / (new.at - struck_at),
    }
