"""How histories begin: attempts of several shapes, at the moments where the rules have most to decide."""

from __future__ import annotations

import msgspec

from stepkeeper.core import events as on
from stepkeeper.core import reasons as because
from stepkeeper.core.causes import Cause, Tried

NODES = ("a", "b", "c")
STARTS = tuple(
    on.AttemptStarted(
        at=0.0, job_id=7, restart_count=0, attempt=0, nodes=nodes, batch_node="a", kill_wait_s=30.0, **shape
    )
    for nodes, shape in (
        (("a", "b"), {}),
        (("a", "b"), {"end_at": 500.0}),
        (("a", "b"), {"batch": False}),
        (("a", "b"), {"nodes_min": 1}),
        (("a", "b", "c"), {"nodes_wanted": 2}),
        (("a", "b", "c"), {"nodes_wanted": 2, "nodes_min": 1}),
    )
)


SHRUNK: tuple[on.Event, ...] = (
    on.AttemptStarted(
        at=0.0,
        job_id=7,
        restart_count=0,
        attempt=0,
        nodes=("a", "b"),
        batch_node="a",
        kill_wait_s=30.0,
        nodes_min=1,
    ),
    on.WatcherReady(at=0.0, node="a", bus=1),
    on.WatcherReady(at=0.0, node="b", bus=1),
    on.StorageTested(at=0.0, ok=True),
    on.CheckpointChosen(at=0.0, directory=None, step=None),
    on.NodesCleared(at=0.0, launch=0, address="a", port=1, unfit=(on.Unfit(node="b", why="GPU"),)),
    on.NodesCleared(at=0.0, launch=0, address="a", port=1),
    on.RankHello(at=0.0, launch=0, rank=0, node="a"),
    on.Progressed(at=0.0, launch=0, step=1, tokens=1, loss=1.0),
)
"""A training that could do without a node, which failed its check."""
SHRUNK_TWICE: tuple[on.Event, ...] = (
    msgspec.structs.replace(SHRUNK[0], nodes=("a", "b", "c")),
    *[on.WatcherReady(at=0.0, node=node, bus=1) for node in "abc"],
    on.NodeFaulted(
        at=0.0, node="c", incident="i", name="XID 79", action="drain_reboot", leave=True, why="lost", drained=True
    ),
    *SHRUNK[3:],
)
"""The same, and another one is gone for good."""
SHRUNK_AND_FAILED: tuple[on.Event, ...] = (*SHRUNK_TWICE, on.LaunchEnded(at=0.0, launch=0, code=1))


def _trained(started: on.AttemptStarted, *more: on.Event) -> tuple[on.Event, ...]:
    """Return how such an attempt comes to a training that has done two steps."""
    launched = {"at": 0.0, "launch": 0}
    return (
        started,
        *[on.WatcherReady(at=0.0, node=node, bus=1) for node in started.nodes],
        on.StorageTested(at=0.0, ok=True),
        on.CheckpointChosen(at=0.0, directory="step_1", step=1),
        on.NodesCleared(address="a", port=1, **launched),
        on.RankHello(rank=0, node="a", **launched),
        on.Progressed(step=2, tokens=1, loss=1.0, step_seconds=1.0, **launched),
        *more,
    )


_JOB = on.JobFacts(state=on.JobState.RUNNING, slurm_state="RUNNING", restarts=0)
_PREEMPTED = msgspec.structs.replace(_JOB, preempt_at=0.0, end_at=120.0)
_CANCELLED = msgspec.structs.replace(_JOB, state=on.JobState.COMPLETING, slurm_state="COMPLETING")
NOTICE = (on.NodeSignaled(at=0.0, node="a", signal="TERM"), on.SlurmAnswered(at=0.0, job=_PREEMPTED))
_LEFT = on.LaunchEnded(at=0.0, launch=0, code=75, stopped=True)
_FAILURE = (
    on.RankExited(at=0.0, launch=0, rank=1, node="b", code=1),
    on.LaunchEnded(at=0.0, launch=0, code=1),
)
_SCANCEL = (on.SignalReceived(at=0.0, signal="TERM"), on.SlurmAnswered(at=0.0, job=_CANCELLED))
_FINISHED = on.TrainingFinished(at=0.0, launch=0, step=2)
TRAINING = tuple(_trained(started) for started in STARTS)
SAVING = tuple(_trained(started, *NOTICE) for started in STARTS)
REQUEUEING = tuple(_trained(started, *NOTICE, _LEFT) for started in STARTS)
FAILED = tuple(_trained(started, *_FAILURE) for started in STARTS)
CANCELLED = tuple(_trained(started, *_SCANCEL) for started in STARTS)
ENDING = tuple(_trained(started, *NOTICE, _FINISHED) for started in STARTS)
ENDED = tuple((*ending, on.LaunchEnded(at=0.0, launch=0, code=0, finished=True)) for ending in ENDING)
UNSEEN = tuple(  # for more than an hour: no rank has the trainer library
    (
        msgspec.structs.replace(
            started, failures=2, tried=(Tried(cause=Cause.EXCEPTION, place="x", step=5),), best_step=1, end_at=None
        ),
        *_trained(started)[1:-2],
        on.LaunchBegan(at=0.0, launch=0),
        on.LaunchEnded(at=4000.0, launch=0, code=1),
    )
    for started in STARTS
)
UNHEARD = tuple(  # no rank has the trainer library, and some have no wrapper
    (
        msgspec.structs.replace(started, wrapped=wrapped),
        *_trained(started)[1:-2],
        on.LaunchBegan(at=0.0, launch=0),
        *more,
    )
    for started in STARTS
    for wrapped in (True, False)
    for more in ((), NOTICE)
)
_WAYS = (
    (Cause.EXCEPTION, "ValueError at train.py:1"), (Cause.GPU_MEMORY, "rule-1"), (Cause.HOST_MEMORY, "rule-1"),
    (Cause.SEGFAULT, "rule-1"), (Cause.HANG, "rule-1"), (Cause.COLLECTIVE_TIMEOUT, "rule-1"), (Cause.UNKNOWN, "rule-1"),
    (Cause.NUMERICAL, "rule-1"), (Cause.CHECKPOINT, "rule-1"), (Cause.NETWORK, "rule-1"), (Cause.STORAGE, ""),
    (Cause.NODE_FAULT, "b"),
)  # fmt: skip
AGAIN = tuple(  # it failed in most ways before, at the step at which it fails now
    _trained(
        msgspec.structs.replace(
            STARTS[-1],
            tried=tuple(
                Tried(cause=cause, place=place, count=count, step=2, stepped_back=count > 1) for cause, place in _WAYS
            ),
        ),
        *_FAILURE,
    )
    for count in (1, 2, 3, 5)
)


def _slow_save(name: str) -> on.Event:
    return on.CheckpointCommitted(
        at=0.0, launch=0, step=2, save_id=name, emergency=False, directory="step_2", bytes=1, seconds=300.0
    )


SLOW_SAVES = tuple(  # of which one is in flight, or none
    _trained(started, *[_slow_save(name) for name in "abc"], *more)
    for started in STARTS[:2]
    for more in ((), (on.SaveBegan(at=0.0, launch=0, step=2, save_id="d", emergency=False),))
)
_LOST = on.NodeFaulted(at=0.0, node="b", incident="i", name="XID 79", action="drain_reboot", leave=True, why="lost")
_MANY = msgspec.structs.replace(STARTS[-1], nodes=("a", "b", "c", "d"))
_HEARD = (*[on.WatcherReady(at=0.0, node=node, bus=1) for node in "abcd"], on.StorageTested(at=0.0, ok=True))
_CHOSEN = on.CheckpointChosen(at=0.0, directory="step_1", step=1)


def left(*nodes: str) -> tuple[on.Event, ...]:
    """Return how nodes come to be left for good."""
    return tuple(msgspec.structs.replace(_LOST, node=node, incident=node) for node in nodes)


TOLD = tuple(  # what Slurm says of it is still to come, or comes too late
    _trained(started, *more)
    for started in STARTS
    for more in (
        (*NOTICE, on.SignalReceived(at=0.0, signal="USR1")),
        (*NOTICE, on.LaunchEnded(at=0.0, launch=0, code=0, finished=True)),
        (_slow_save("a"), NOTICE[0]),
        (*_FAILURE, NOTICE[0]),
    )
)
MANY_READY = (_MANY, *_HEARD, _CHOSEN)
OWN_NODE_LEFT = (*MANY_READY, *left("a", "d"))
LEFT_AFTER_A_FAILURE = _trained(STARTS[2], *_FAILURE, _LOST)
BUS_RESTARTED = _trained(
    STARTS[0],
    *[
        event
        for bus in (1, 2, 3)
        for event in (
            on.WatcherLost(at=0.0, node="a", bus=bus, why="silent"),
            *[on.WatcherReady(at=0.0, node=node, bus=bus + 1) for node in "ab"],
        )
    ],
)
_FAULT = because.NodeFault(node="x", name="XID 79", text="off the bus")
LOST_BESIDE_A_FAULT = (  # and preempted soon after, with a faulty node of an attempt before
    msgspec.structs.replace(
        STARTS[4],
        excluded=(
            on.Exclusion(
                node="x", reasons=(because.NodeFault(node="x", name="XID 79", text="off the bus"),), until=300.0
            ),
        ),
    ),
    *TRAINING[4][1:],
    on.WatcherLost(at=1.0, node="b", bus=1, why="silent"),
    on.Tick(at=40.0),
    on.SlurmAnswered(at=40.0, job=_JOB),
    *[on.WatcherReady(at=40.0, node=node, bus=3) for node in "ac"],
    on.LaunchEnded(at=41.0, launch=0, code=137),
    on.SignalReceived(at=41.0, signal="TERM"),
    on.SlurmAnswered(at=41.0, job=_PREEMPTED),
)
NODES_LEFT = (
    LOST_BESIDE_A_FAULT,
    (_MANY, *_HEARD, *left("d", "c", "b"), _CHOSEN),
    OWN_NODE_LEFT,
    LEFT_AFTER_A_FAILURE,
    _trained(STARTS[0], _FAILURE[0], on.WatcherLost(at=0.0, node="a", bus=1, why="silent")),
    BUS_RESTARTED,
)
NOT_READY = (  # a launch that must not start
    (STARTS[0], *_HEARD[:2], on.StorageTested(at=0.0, ok=False, problem="full"), _CHOSEN),
    (
        STARTS[0], *_HEARD[:2], _HEARD[-1], _CHOSEN, on.WatcherLost(at=0.0, node="b", bus=1, why="silent"),
        on.NodesCleared(at=0.0, launch=0, address="a", port=1),
    ),
)  # fmt: skip
FAILED_OFTEN = tuple(  # twice before, and no further step since
    _trained(msgspec.structs.replace(started, failures=2, best_step=3), *_FAILURE) for started in STARTS
)
LEAVING = (*UNHEARD, *SAVING, *REQUEUEING, *CANCELLED, *ENDING, *ENDED)
BEGINNINGS = (
    *[(started,) for started in STARTS], *TRAINING, *TRAINING, *TRAINING, *FAILED, *LEAVING
)  # fmt: skip
