"""Histories that break a promise under one mistake each: chance comes to them seldom, so they are always played."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from stepkeeper.core import events as on
from stepkeeper.core.causes import Cause, SkippedData
from stepkeeper.core.policy import Policy
from tests.core.beginnings import (
    AGAIN,
    BUS_RESTARTED,
    FAILED,
    LEFT_AFTER_A_FAILURE,
    LOST_BESIDE_A_FAULT,
    MANY_READY,
    NOTICE,
    OWN_NODE_LEFT,
    REQUEUEING,
    SHRUNK_AND_FAILED,
    STARTS,
    TRAINING,
    left,
)
from tests.core.promises import GROWING, POLICY

_TERM = on.SignalReceived(at=1.0, signal="TERM")
_RUNS = on.SlurmAnswered(at=1.0, job=on.JobFacts(state=on.JobState.RUNNING, slurm_state="RUNNING", restarts=0))
_REFUSED = on.BusEnded(at=1.0, bus=1, code=1, error="Invalid generic resource (gres) specification")
_CHOSEN = on.CheckpointChosen(at=1.0, directory="step_1", step=1)
_BEYOND = on.CheckpointChosen(at=1.0, directory="step_9", step=9)  # what went wrong at step 2
_SKIPPING = msgspec.structs.replace(POLICY, skip_data_steps=2)
_TAKES_OVER = on.AttemptStarted(
    at=0.0,
    job_id=7,
    restart_count=1,
    attempt=1,
    nodes=("a", "b"),
    batch_node="a",
    kill_wait_s=30.0,
    skipped_data=(SkippedData(step=18, steps=1),),
)
_CORRUPTED_AND_TAKEN = (
    *TRAINING[0],
    on.Corrupted(at=1.0, launch=0, rank=1, node="b", step=2, confirmed=1),
    on.LaunchEnded(at=1.0, launch=0, code=1),
    *NOTICE,
    NOTICE[1],  # asked again before the requeue
)


def _judged(cause: Cause) -> on.Judged:
    return on.Judged(at=1.0, launch=0, cause=cause, rule="rule-1", confidence=0.9, step=2)


class Directed(NamedTuple):
    """A history, and the mistake that it finds: what the mutation `breaks`."""

    finds: str
    events: tuple[on.Event, ...]
    policy: Policy = POLICY


DIRECTED = (
    Directed("a rollback goes back", (*AGAIN[0], _CHOSEN, _judged(Cause.UNKNOWN))),
    Directed(
        "a rollback says to the lineage which data is left out",
        (*AGAIN[0], _BEYOND, _judged(Cause.NUMERICAL)),
        _SKIPPING,
    ),
    Directed("the next attempt leaves out the same data", (_TAKES_OVER,)),
    Directed("what silent corruption made is left out before the job leaves", _CORRUPTED_AND_TAKEN),
    Directed("the job leaves when the lineage leads back", _CORRUPTED_AND_TAKEN),
    Directed("a full file system is waited for only so often", (*AGAIN[-1], _CHOSEN, _judged(Cause.STORAGE))),
    Directed(
        "restarts of the bus are bounded",
        (*BUS_RESTARTED, on.WatcherLost(at=1.0, node="a", bus=4, why="silent")),
    ),
    Directed("a preemption is in no budget of the training", (*FAILED[0], *NOTICE)),
    Directed(
        "lost nodes are bounded, in a start too",
        (*MANY_READY, *left("d", "c", "b"), on.NodesCleared(at=1.0, launch=0, address="a", port=1)),
    ),
    Directed("the supervisor's own node is kept", OWN_NODE_LEFT),
    Directed("a fault of a node is in no budget of the training", LEFT_AFTER_A_FAILURE),
    Directed("without a batch script nothing is requeued", (*REQUEUEING[2], NOTICE[1])),
    Directed("our own requeue's signal starts no second one", (*REQUEUEING[0], NOTICE[1], _TERM, NOTICE[1])),
    Directed("where Slurm refuses every step, no node is lost", (STARTS[0], _REFUSED, on.Tick(at=31.0), _RUNS)),
    Directed(
        "a smaller launch has a number of nodes that divides its batch",
        (
            msgspec.structs.replace(STARTS[3], node_counts=(2,)),
            *TRAINING[3][1:],
            *left("b"),
            on.LaunchEnded(at=1.0, launch=0, code=137),
            _CHOSEN,
            on.NodesCleared(at=1.0, launch=1, address="a", port=1),
        ),
    ),
    Directed("lost nodes make room for faulty ones", (*LOST_BESIDE_A_FAULT, LOST_BESIDE_A_FAULT[-1])),
    Directed(
        "a first look ends only what the next one would end",
        (
            *TRAINING[0],
            *[
                on.Progressed(at=0.2 * each, launch=0, step=1 + each, tokens=1, loss=1.0, step_seconds=0.2)
                for each in range(1, 11)
            ],
            on.Tick(at=6.0),
            on.StacksCollected(at=10.0, launch=0, moved=False, summary="rank 1 sleeps", sure_s=20.0),
        ),
    ),
    Directed(
        "only a node that rested comes back",
        (*SHRUNK_AND_FAILED, on.CheckpointChosen(at=10.0, directory=None, step=None)),
        GROWING,
    ),
)
