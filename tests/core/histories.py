"""Histories for the property tests: arbitrary ones, and realistic ones from a small model of the world."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from hypothesis import strategies as st

from stepkeeper.core import effects as do
from stepkeeper.core import events as on
from stepkeeper.core.causes import Cause, Tried
from stepkeeper.core.decide import decide
from stepkeeper.core.phases import Decision
from stepkeeper.core.policy import Policy
from stepkeeper.core.state import State

NODES = ("a", "b", "c")
STARTS = tuple(
    on.AttemptStarted(
        at=0.0, job_id=7, restart_count=0, attempt=0, nodes=nodes, batch_node="a", kill_wait_s=30.0, **shape
    )
    for nodes, shape in (
        (("a", "b"), {}),
        (("a", "b"), {"end_at": 500.0}),
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
_NOTICE = (on.NodeSignaled(at=0.0, node="a", signal="TERM"), on.SlurmAnswered(at=0.0, job=_PREEMPTED))
_LEFT = on.LaunchEnded(at=0.0, launch=0, code=75, stopped=True)
_FAILURE = (
    on.RankExited(at=0.0, launch=0, rank=1, node="b", code=1),
    on.LaunchEnded(at=0.0, launch=0, code=1),
)
_SCANCEL = (on.SignalReceived(at=0.0, signal="TERM"), on.SlurmAnswered(at=0.0, job=_CANCELLED))
_FINISHED = on.TrainingFinished(at=0.0, launch=0, step=2)
TRAINING = tuple(_trained(started) for started in STARTS)
SAVING = tuple(_trained(started, *_NOTICE) for started in STARTS)
REQUEUEING = tuple(_trained(started, *_NOTICE, _LEFT) for started in STARTS)
FAILED = tuple(_trained(started, *_FAILURE) for started in STARTS)
CANCELLED = tuple(_trained(started, *_SCANCEL) for started in STARTS)
ENDING = tuple(_trained(started, *_NOTICE, _FINISHED) for started in STARTS)
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
LEAVING = (*SAVING, *REQUEUEING, *CANCELLED, *ENDING, *ENDED)
BEGINNINGS = (
    *[(started,) for started in STARTS], *TRAINING, *TRAINING, *TRAINING, *FAILED, *LEAVING
)  # fmt: skip


class Turn(msgspec.Struct, frozen=True):
    """One event and what came of it."""

    before: State
    event: on.Event
    decision: Decision

    @property
    def after(self) -> State:
        return self.decision.state

    def ordered(self, kind: type) -> list[do.Effect]:
        return [effect for effect in self.decision.effects if isinstance(effect, kind)]


def run(events: list[on.Event], policy: Policy) -> list[Turn]:
    """Play a history from its first event."""
    turns, state = [], State()
    for event in events:
        decision = decide(state, event, policy)
        turns.append(Turn(state, event, decision))
        state = decision.state
    return turns


# --- arbitrary ------------------------------------------------------------------------------------

_small = st.integers(0, 3)
_nodes = st.sampled_from((*NODES, "stranger"))
_optional_time = st.none() | st.floats(0, 4000, allow_nan=False)
jobs = st.builds(
    on.JobFacts,
    state=st.sampled_from(on.JobState),
    slurm_state=st.just("?"),
    restarts=st.sampled_from((0, 0, 0, 1)),
    reason=st.sampled_from(("None", "TimeLimit")),
    preempt_at=_optional_time,
    end_at=_optional_time,
    requeue_allowed=st.sampled_from((True, True, True, False)),
)
_launch = {"launch": _small}
_unfit = st.builds(on.Unfit, node=_nodes, why=st.just("clock"), shared=st.booleans())
_save = {"step": _small, "save_id": st.sampled_from("xy"), "emergency": st.booleans()}
_directory = st.sampled_from(("step_1", "step_2"))
_damaged = tuple(on.Skipped(directory=name, problem="wrong", damaged=True) for name in ("step_3", "step_4"))
_skipped = st.sampled_from(((), (), _damaged[:1], _damaged))
FIELDS = {
    on.Tick: {},
    on.StoodStill: {"seconds": st.sampled_from((6.0, 300.0))},
    on.SignalReceived: {"signal": st.sampled_from(("TERM", "INT", "USR1", "USR2"))},
    on.NodeSignaled: {"node": _nodes, "signal": st.just("TERM")},
    on.SlurmAnswered: {"job": st.none() | jobs, "error": st.just("unreachable")},
    on.RequeueAnswered: {"ok": st.booleans(), "error": st.just("refused")},
    on.WatcherReady: {"node": _nodes, "bus": _small},
    on.WatcherLost: {"node": _nodes, "bus": _small, "why": st.just("silent")},
    on.BusEnded: {"bus": _small, "code": _small},
    on.NodesCleared: {
        **_launch,
        "address": st.just("a"),
        "port": st.just(1),
        "unfit": st.lists(_unfit, max_size=2).map(tuple),
    },
    on.NodeFaulted: {
        "node": _nodes,
        "incident": st.sampled_from("ij"),
        "name": st.just("XID 79"),
        "action": st.just("drain_reboot"),
        "leave": st.booleans(),
        "why": st.just("lost"),
        "drained": st.booleans(),
    },
    on.NodesReleased: {"ok": st.booleans()},
    on.NodesChecked: {
        "nodes": st.lists(_nodes, max_size=2).map(tuple),
        "unfit": st.lists(_unfit, max_size=1).map(tuple),
    },
    on.IdleNodes: {"nodes": st.lists(_nodes, max_size=2).map(tuple), "error": st.sampled_from(("", "", "unreachable"))},
    on.NodesNotCleared: {**_launch, "nodes": st.lists(_nodes, max_size=2).map(tuple)},
    on.CheckpointChosen: {"directory": st.none() | _directory, "step": st.none() | _small, "skipped": _skipped},
    on.ChoiceFailed: {"error": st.just("hung")},
    on.CheckpointVerified: {"directory": _directory, "ok": st.booleans()},
    on.StorageTested: {
        "ok": st.sampled_from((True, True, True, False)),
        "untrue": st.sampled_from((False, False, True)),
        "thorough": st.booleans(),
    },
    on.LaunchBegan: {**_launch},
    on.RankHello: {**_launch, "rank": _small, "node": _nodes},
    on.RankExited: {
        **_launch,
        "rank": _small,
        "node": _nodes,
        "code": st.none() | st.sampled_from((0, 1, 75, 93)),
        "signal": st.none() | st.sampled_from((9, 15)),
    },
    on.Progressed: {
        **_launch, "step": _small, "tokens": _small, "loss": st.just(1.0), "step_seconds": st.none() | st.just(1.0),
        "not_finite": st.sampled_from((False, False, False, True)),
    },
    on.NodesPaced: {
        **_launch, "step": _small, "step_seconds": st.just(1.0), "own": st.sampled_from(
            ((("a", 0.5), ("b", 0.5)), (("a", 0.5), ("b", 0.9)), (("a", 0.5),), (("stranger", 0.9), ("b", 0.0)))
        ),
    },
    on.Replayed: {
        **_launch, "step": _small, "steps": st.integers(1, 3), "worst": st.none() | _small,
        "then": st.none() | st.just(1.0), "now": st.just(1.5), "deterministic": st.booleans(),
    },
    on.SaveBegan: {**_launch, **_save},
    on.CheckpointCommitted: {
        **_launch, **_save, "directory": _directory, "bytes": _small, "seconds": st.sampled_from((1.0, 300.0)),
        "by_disk": st.booleans(),
    },
    on.SaveGaveUp: {**_launch, **_save, "error": st.just("full")},
    on.TrainingFinished: {**_launch, "step": _small},
    on.TrainingStopped: {**_launch, "step": _small},
    on.LaunchEnded: {
        **_launch,
        "code": st.sampled_from((0, 1, 75, 93)),
        "finished": st.sampled_from((False, False, True)),
        "stopped": st.booleans(),
    },
    on.LaunchRefused: {**_launch, "error": st.just("no srun")},
    on.Judged: {
        **_launch,
        "cause": st.sampled_from(Cause),
        "rule": st.sampled_from(("rule-1", "rule-2")),
        "confidence": st.sampled_from((0.3, 0.9)),
        "location": st.sampled_from(("", "ValueError at train.py:1")),
        "node": st.sampled_from(("", *NODES)),
        "step": st.none() | _small,
    },
    on.StacksCollected: {
        **_launch,
        "moved": st.booleans(),
        "summary": st.just("rank 1 sleeps"),
        "node": st.sampled_from(("", *NODES)),
    },
    on.RolledBack: {**_launch, "directory": _directory, "step": _small, "error": st.sampled_from(("", "", "full"))},
    on.Asked: {
        "name": st.sampled_from(("ask-1", "ask-2")),
        "kind": st.sampled_from(("save", "stop")),
        "by": st.just("ada"),
    },
    on.Superseded: {"by_job_id": st.just(7), "by_restart_count": st.just(1)},
    on.AttemptStarted: {
        "job_id": st.just(7),
        "restart_count": st.just(0),
        "attempt": st.just(0),
        "nodes": st.just(NODES),
        "batch_node": st.just("a"),
        "kill_wait_s": st.just(30.0),
        "finished_step": st.none() | _small,
        "wrapped": st.booleans(),
        "nodes_wanted": st.integers(0, 2),
        "nodes_min": st.integers(0, 2),
        "end_at": _optional_time,
    },
}  # fmt: skip


def _event(kind: type) -> st.SearchStrategy[on.Event]:
    return st.builds(kind, at=st.just(0.0), **FIELDS[kind])


any_event = st.one_of([_event(kind) for kind in FIELDS])
_pauses = st.sampled_from((0.0, 0.0, 0.01, 1.0, 5.0, 20.0, 200.0))


@st.composite
def arbitrary(draw: st.DrawFn, size_max: int = 40) -> list[on.Event]:
    """Return any events at all in any order, after any beginning; time alone goes forward."""
    events: list[on.Event] = [*draw(st.sampled_from(BEGINNINGS))]
    at = 0.0
    for event, pause in draw(st.lists(st.tuples(any_event, _pauses), max_size=size_max)):
        at += pause
        events.append(msgspec.structs.replace(event, at=at))
    return events


# --- realistic ------------------------------------------------------------------------------------

OFTEN = {  # how often of a hundred what comes unasked is this
    on.Progressed: 14,
    on.SaveBegan: 10,
    on.CheckpointCommitted: 12,
    on.RankExited: 12,
    on.LaunchEnded: 10,
    on.NodeSignaled: 8,
    on.SignalReceived: 8,
    on.NodeFaulted: 6,
    on.WatcherLost: 5,
    on.BusEnded: 4,
    on.TrainingStopped: 4,
    on.TrainingFinished: 2,
    on.Asked: 3,
    on.StoodStill: 1,
    on.Superseded: 1,
}
NODES_FAIL = {on.NodeFaulted: 6, on.WatcherLost: 4, on.BusEnded: 2, on.RankExited: 1}


_ANSWERS = (
    {},
    {},
    {"state": on.JobState.COMPLETING},
    {"state": on.JobState.COMPLETING, "reason": "TimeLimit"},
    {"state": on.JobState.COMPLETING, "restarts": 1},
    {"preempt_at": 1.0},
    {"preempt_at": 1.0},
)


@st.composite
def realistic(
    draw: st.DrawFn,
    policy: Policy,
    size_max: int = 40,
    beginnings: tuple[tuple[on.Event, ...], ...] = BEGINNINGS,
    often: Mapping[type, int] = OFTEN,
) -> list[on.Event]:
    """Return a history in which orders are answered, mostly soon, and trouble comes at any moment.

    Events carry the newest launch and bus, answers come only to what was asked, and the deadline of the
    state is met by a `Tick`, as the supervisor's loop does it.  What was ordered before the last event of its beginning
    is answered.
    """
    events: list[on.Event] = [*draw(st.sampled_from(beginnings))]
    decision = run(events, policy)[-1].decision
    due = list(decision.effects)
    at = events[-1].at
    for _ in range(draw(st.integers(1, size_max))):
        state = decision.state
        at += draw(_pauses)
        if state.wake_at is not None and at >= state.wake_at:
            event: on.Event = on.Tick(at=at)
        elif due and draw(st.integers(0, 4)):
            effect = due.pop(draw(st.integers(0, len(due) - 1)))
            answer = _answer(draw, effect, state, at)
            due += answer[1]
            if answer[0] is None:
                continue
            event = answer[0]
        else:
            event = draw(_trouble(state, at, often))
        events.append(event)
        decision = decide(state, event, policy)
        due += decision.effects
    return events


def _answer(  # noqa: C901, PLR0912 - one case an effect
    draw: st.DrawFn, effect: do.Effect | on.Event, state: State, at: float
) -> tuple[on.Event | None, list[on.Event]]:
    """Return what the world says to an order, now and later."""
    match effect:
        case do.StartBus():
            ready = [on.WatcherReady(at=at, node=node, bus=effect.bus) for node in effect.nodes]
            if effect.bus > 1 and draw(st.integers(0, 2)) == 0:
                ready.pop()  # that node is lost
            return (ready[0], ready[1:]) if ready else (None, [])
        case do.StopBus():
            return on.BusEnded(at=at, bus=state.bus, code=0), []
        case do.ChooseCheckpoint():
            step = draw(st.none() | _small)
            directory = None if step is None else "step"
            return on.CheckpointChosen(at=at, directory=directory, step=step, skipped=draw(_skipped)), []
        case do.TestStorage():
            ok = draw(st.integers(0, 5)) > 0
            return on.StorageTested(at=at, ok=ok, problem="" if ok else "full", thorough=effect.thorough), []
        case do.VerifyCheckpoint():
            return on.CheckpointVerified(at=at, directory=effect.directory, ok=draw(st.booleans())), []
        case do.ClearNodes():
            unfit = (on.Unfit(node=effect.nodes[-1], why="clock"),) if draw(st.integers(0, 7)) == 0 else ()
            return on.NodesCleared(at=at, launch=effect.launch, address="a", port=1, unfit=unfit), []
        case do.StartLaunch():
            if draw(st.integers(0, 5)) == 0:
                return None, []  # srun hangs
            began = on.LaunchBegan(at=at, launch=effect.launch)
            if draw(st.integers(0, 5)) == 0:
                return began, []  # a script without the trainer library
            hello = on.RankHello(at=at, launch=effect.launch, rank=0, node="a")
            return began, [hello, draw(_word(on.Progressed, effect.launch))]
        case do.RequestSave():
            if not effect.stop:
                return None, []
            words = [on.SaveBegan, on.CheckpointCommitted, on.TrainingStopped]
            began, *later = [draw(_word(kind, state.launch)) for kind in words]
            return msgspec.structs.replace(began, at=at), later
        case do.KillRanks():
            return on.LaunchEnded(at=at, launch=effect.launch, code=137), []
        case do.AskUncleared():
            missing = draw(st.sampled_from(((), state.nodes[:1], state.nodes)))
            return on.NodesNotCleared(at=at, launch=effect.launch, nodes=missing), []
        case do.Look() | do.CallPerson() | do.AnswerAsk() | do.TellSlowNode() | do.TellSlowLaunch() | do.TellReplay():
            return None, []
        case do.CollectStacks():
            if draw(st.integers(0, 3)) == 0:
                return None, []  # no watcher answers
            return msgspec.structs.replace(draw(_word(on.StacksCollected, effect.launch)), at=at), []
        case do.JudgeLaunch():
            if draw(st.integers(0, 9)) == 0:
                return None, []  # the storage hangs
            return msgspec.structs.replace(draw(_word(on.Judged, effect.launch)), at=at), []
        case do.RollBack():
            return msgspec.structs.replace(draw(_word(on.RolledBack, effect.launch)), at=at), []
        case do.ReleaseNodes():
            return on.NodesReleased(at=at, ok=draw(st.booleans())), []
        case do.CheckNodes():
            unfit = tuple(on.Unfit(node=node, why="clock") for node in effect.nodes[: draw(st.integers(0, 1))])
            return on.NodesChecked(at=at, nodes=effect.nodes, unfit=unfit), []
        case do.AskIdleNodes():
            return on.IdleNodes(at=at, nodes=draw(st.sampled_from(((), ("x",), ("x", "y"))))), []
        case do.AskSlurm():
            if draw(st.integers(0, 5)) == 0:
                return on.SlurmAnswered(at=at, error="unreachable"), []
            facts = {"state": on.JobState.RUNNING, "restarts": 0, "end_at": at + 60.0}
            facts |= draw(st.sampled_from(_ANSWERS))
            return on.SlurmAnswered(at=at, job=on.JobFacts(slurm_state="?", **facts)), []
        case do.Requeue():
            return on.RequeueAnswered(at=at, ok=draw(st.booleans()), forbidden=draw(st.booleans())), []
        case do.Exit():
            return None, []
        case _:
            return msgspec.structs.replace(effect, at=at), []


def _word(kind: type, launch: int) -> st.SearchStrategy[on.Event]:
    fixed = {"launch": st.just(launch)}
    if "emergency" in kind.__struct_fields__:
        fixed["emergency"] = st.just(True)  # noqa: FBT003 - a strategy, not a flag
    return st.builds(kind, at=st.just(0.0), **{**FIELDS[kind], **fixed})


def _trouble(state: State, at: float, often: Mapping[type, int]) -> st.SearchStrategy[on.Event]:
    """Return what comes unasked: signals, losses, failures, the end."""
    now = {"at": st.just(at)}
    fixed = {"launch": st.just(state.launch), "bus": st.just(state.bus)}
    every = {
        kind: st.builds(
            kind,
            **{
                **FIELDS[kind],
                **{name: value for name, value in fixed.items() if name in kind.__struct_fields__},
                **now,
            },
        )
        for kind in often
    }
    return st.sampled_from([kind for kind, times in often.items() for _ in range(times)]).flatmap(every.__getitem__)
