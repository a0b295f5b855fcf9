"""What lies between a fault and the next new step under Stepkeeper, piece by piece, from the run's journal."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
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


Holds = Callable[[journal.Record], bool]


def _ordered(kind: type) -> Holds:
    return lambda record: any(isinstance(effect, kind) for effect in record.effects)


def _came(*kinds: type) -> Holds:
    return lambda record: isinstance(record.event, kinds)


def _again(told: Iterable[Step], started: float, known_at: float) -> tuple[Step, Step]:
    """Return the first step of the next launch, and its first new one: beyond those that were done at an instant."""
    told = list(told)
    furthest = max(step.number for step in told if step.at <= known_at)
    again = [step for step in told if step.at > started]
    return again[0], next(step for step in again if step.number > furthest)


def of_rank(path: Path, struck_at: float, told: Iterable[Step]) -> dict[str, float]:
    """Return the pieces of the first relaunch after a killed rank.

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
        return next(r.event.at for r in records if r.event.at >= struck_at and _ordered(kind)(r))

    seen = first(on.RankExited, 0)
    # the record of an event bears the launch that it leads to
    ended = next(r.event.at for r in records if isinstance(r.event, on.LaunchEnded) and r.event.launch == 0)
    chosen, judged = (first(kind, 1, ended) for kind in (on.CheckpointChosen, on.Judged))
    asked, started = ordered(do.ClearNodes), ordered(do.StartLaunch)
    began, hello = first(on.LaunchBegan, 1), first(on.RankHello, 1)
    again, new = _again(told, started, struck_at)
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
        LOADED: again.at - hello,
        REDONE: new.at - again.at,
        SHARE: 100 * (hello - began) / (new.at - struck_at),
    }


# What ends a piece after a hang.
HUNG_LAST = "rank stands still to the last step done by rank 0, s"
HUNG_LOOK = "last step to the first look, s"
HUNG_SEEN = "the look to the verdict, s (stacks, 3 s, stacks, flight recorders)"
HUNG_ENDED = "verdict to the Slurm step's end, s"
HUNG_STARTED = "its end to the next launch, s (checkpoint, nodes)"
HUNG_SUM = "**rank stands still to the verdict, s** (target: under 10)"
HUNG_WHOLE = "**rank stands still to the first new step, s**"


def of_hang(path: Path, struck_at: float, told: Iterable[Step]) -> dict[str, float]:
    """Return the pieces of the first relaunch after a rank that stands still; as `of_rank`."""
    records = list(journal.read(path))

    def first(holds: Holds) -> float:
        return next(r.event.at for r in records if r.event.at >= struck_at and holds(r))

    killed, started = first(_ordered(do.KillRanks)), first(_ordered(do.StartLaunch))
    looked = max(r.event.at for r in records if _ordered(do.CollectStacks)(r) and r.event.at < killed)
    told = list(told)
    last = max(step.at for step in told if step.at <= looked)
    again, new = _again(told, started, started)
    marks = (
        ("", struck_at),
        (HUNG_LAST, last),
        (HUNG_LOOK, looked),
        (HUNG_SEEN, killed),
        (HUNG_ENDED, first(_came(on.LaunchEnded))),
        (HUNG_STARTED, started),
        (TASKS, first(_came(on.LaunchBegan))),
        (HELLO, first(_came(on.RankHello))),
        (LOADED, again.at),
        (REDONE, new.at),
    )
    found = {name: at - before for (_, before), (name, at) in itertools.pairwise(marks)}
    return {**found, HUNG_SUM: killed - struck_at, HUNG_WHOLE: new.at - struck_at}


# What ends a piece after a lost node: each begins where the one before ended.  Some are not there where the job keeps
# its allocation, and their order depends on what is known first.
LOST_SEEN = "until a rank failed, or a watcher fell silent, s"
LOST_STOPPED = "until the Slurm step ended, s"
LOST_PREPARED = "until checkpoint and verdict were there, s"
LOST_KNOWN = "until the node was known as lost, s"
LOST_LEAVES = "until the requeue was asked for, s"
LOST_REQUEUED = "until the job was requeued, and its excluded nodes set (Slurm), s"
LOST_EXIT = "until the supervisor had left, s"
LOST_AGAIN = "until the next attempt began (Slurm), s"
LOST_ASKED = "until the nodes were asked to be clear, s"
LOST_CLEARED = "until the next launch, s"
LOST_TASKS = "until its tasks ran (Slurm), s"
LOST_HELLO = "until the trainer library's first word (imports of Python and torch), s"
LOST_LOADED = "until the first step was done (ranks meet, load, step), s"
LOST_REDONE = "until the first new step, s"
LOST_SUM = "**node lost to the next launch, s**"
LOST_WHOLE = "**node lost to the first new step, s**"


def of_node(path: Path, struck_at: float, told: Iterable[Step]) -> dict[str, float]:
    """Return the pieces of the first relaunch after a lost node, in this allocation or the next; as `of_rank`."""
    records = [record for record in journal.read(path) if record.event.at >= struck_at]
    attempt = records[0].attempt

    def first(holds: Holds) -> float | None:
        return next((record.event.at for record in records if holds(record)), None)

    started = first(_ordered(do.StartLaunch))
    assert started is not None
    asked = [r.event.at for r in records if _ordered(do.ClearNodes)(r) and r.event.at <= started]
    prepared = [
        r.event.at
        for r in records
        if _came(on.CheckpointChosen, on.Judged)(r) and r.attempt == attempt and r.event.at <= started
    ]
    again, new = _again(told, started, struck_at)
    marks = (
        (first(_came(on.RankExited, on.WatcherLost)), LOST_SEEN),
        (first(_came(on.LaunchEnded)), LOST_STOPPED),
        (max(prepared, default=None), LOST_PREPARED),
        (first(lambda record: record.node_losses > 0), LOST_KNOWN),
        (first(_ordered(do.Requeue)), LOST_LEAVES),
        (first(_came(on.RequeueAnswered)), LOST_REQUEUED),
        (first(_ordered(do.Exit)), LOST_EXIT),
        (first(_came(on.AttemptStarted)), LOST_AGAIN),
        (max(asked), LOST_ASKED),
        (started, LOST_CLEARED),
        (first(_came(on.LaunchBegan)), LOST_TASKS),
        (first(_came(on.RankHello)), LOST_HELLO),
        (again.at, LOST_LOADED),
        (new.at, LOST_REDONE),
    )
    there = sorted((at, name) for at, name in marks if at is not None and at <= new.at)
    found = {name: at - before for (before, _), (at, name) in itertools.pairwise([(struck_at, ""), *there])}
    return {**found, LOST_SUM: started - struck_at, LOST_WHOLE: new.at - struck_at}
