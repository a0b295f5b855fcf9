"""Realistic histories: a small model of the world answers what is ordered, and has troubles of its own."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from hypothesis import strategies as st

from stepkeeper.core import effects as do
from stepkeeper.core import events as on
from stepkeeper.core.decide import decide
from stepkeeper.core.policy import Policy
from stepkeeper.core.state import State
from tests.core.beginnings import BEGINNINGS
from tests.core.histories import FIELDS, begun, pauses, run, skipped, small

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
    on.Requested: 3,
    on.Suspended: 1,
    on.ClockSet: 1,
    on.RunDirectoryGone: 1,
    on.Superseded: 1,
}
NODES_FAIL = {on.NodeFaulted: 6, on.WatcherLost: 4, on.BusEnded: 2, on.RankExited: 1}


_ANSWERS = (
    {},
    {},
    {"state": on.JobState.COMPLETING},
    {"state": on.JobState.COMPLETING, "reason": "TimeLimit"},
    {"state": on.JobState.COMPLETING, "restarts": 1},
    {"state": on.JobState.PENDING, "restarts": 1},
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
    events = draw(begun(beginnings))
    decision = run(events, policy)[-1].decision
    due = list(decision.effects)
    at = events[-1].at
    for _ in range(draw(st.integers(1, size_max))):
        state = decision.state
        at += draw(pauses)
        if state.wake_at is not None and draw(st.integers(0, 11)) == 0:
            at = max(at, state.wake_at)  # nothing happens until then
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
            return on.BusEnded(at=at, bus=state.watchers.bus, code=0), []
        case do.ChooseCheckpoint():
            step = draw(st.none() | small)
            directory = None if step is None else "step"
            return on.CheckpointChosen(at=at, directory=directory, step=step, skipped=draw(skipped)), []
        case do.TestStorage():
            ok = draw(st.integers(0, 5)) > 0
            return on.StorageTested(at=at, ok=ok, problem="" if ok else "full", thorough=effect.thorough), []
        case do.VerifyCheckpoint():
            return on.CheckpointVerified(at=at, directory=effect.directory, ok=draw(st.booleans())), []
        case do.ClearNodes():
            unfit = draw(
                st.sampled_from(
                    (
                        *[()] * 6,
                        (on.Unfit(node=effect.nodes[-1], why="clock"),),
                        tuple(on.Unfit(node=node, why="storage", shared=True) for node in effect.nodes),
                    )
                )
            )
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
            began, *later = [draw(_word(kind, state.launch.number)) for kind in words]
            return msgspec.structs.replace(began, at=at), later
        case do.KillRanks():
            return on.LaunchEnded(at=at, launch=effect.launch, code=137), []
        case do.AskUncleared():
            missing = draw(st.sampled_from(((), state.nodes.usable[:1], state.nodes.usable)))
            return on.NodesNotCleared(at=at, launch=effect.launch, nodes=missing), []
        case (
            do.Look()
            | do.NotifyUser()
            | do.AnswerRequest()
            | do.ReportSlowNode()
            | do.ReportSlowLaunch()
            | do.ReportReplay()
        ):
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
    fixed = {"launch": st.just(state.launch.number), "bus": st.just(state.watchers.bus)}
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
