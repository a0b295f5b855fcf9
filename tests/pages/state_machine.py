"""`docs/state-machine.md`: a diagram and a table, made by running `decide` over sample states and events."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import msgspec

from stepkeeper.core import events as on
from stepkeeper.core import reasons as because
from stepkeeper.core.causes import Cause, Notice
from stepkeeper.core.decide import decide
from stepkeeper.core.phases import Decision
from stepkeeper.core.policy import Policy
from stepkeeper.core.state import (
    Announced,
    BusStatus,
    Choice,
    Failure,
    Growth,
    Identity,
    Launch,
    Next,
    Nodes,
    Phase,
    Plan,
    Query,
    Question,
    Ranks,
    Resting,
    State,
    Timer,
    Timers,
    Watchers,
)
from tests.pages.tables import MADE

AT = 1000.0
LATE = AT + 1e6
NODES = ("a", "b")
STEP = "step_00000901"
_RESTS = Growth(resting=(Resting(node="c", look_at=AT),), looked_at=("c",), look_until=LATE, failed=(("c", 3),))
_HEAD = f"""\
# The state machine

{MADE}

## Phases

Each arrow names the events that lead from one phase to the next in the table below.
"""
_TABLE = """
## Events

Each column is a typical state of a phase. Each cell shows what `decide` does at the event: the next phase, if it
changes, then the effects in order. A dot: nothing. With other data an event can lead to other effects: see the
scenarios in `tests/core/scenarios`. `tests/core/test_properties.py` states what holds for all.
"""

replace = msgspec.structs.replace


def _states() -> dict[str, State]:
    """Return a typical state of each phase."""
    starting = State(
        identity=Identity(attempt=1),
        nodes=Nodes(usable=NODES, wanted=2),
        launch=Launch(nodes=NODES),
        watchers=Watchers(bus=1, status=BusStatus.OPEN, ready=frozenset("a")),
        timers=Timers({Timer.WATCHERS: AT + 60}),
        query=Query(question=Question.ASKED),
    )
    judging = replace(
        starting,
        query=Query(),
        watchers=replace(starting.watchers, ready=frozenset(NODES)),
        resume=replace(starting.resume, choice=Choice.CHOSEN, step=800),
        failure=Failure(judge_by=AT + 20),
        timers=Timers({Timer.CAUSE: AT + 60}),
    )
    clearing = replace(
        starting,
        watchers=replace(starting.watchers, ready=frozenset(NODES)),
        resume=replace(starting.resume, choice=Choice.CHOSEN),
        timers=Timers({Timer.CLEARING: AT + 60}),
    )
    training = replace(
        clearing,
        phase=Phase.TRAINING,
        launch=replace(clearing.launch, ranks=Ranks.RUNNING, announced=Announced.LIBRARY, step=900),
        timers=Timers(),
    )
    leave = Plan(next=Next.REQUEUE, why=(because.SlurmSaid(notice=Notice.PREEMPTED, slurm_state="RUNNING"),))
    saving = replace(
        training,
        phase=Phase.SAVING,
        leaving=replace(training.leaving, plan=leave),
        launch=replace(training.launch, saving="s1"),
        timers=Timers({Timer.SAVE: AT + 60}),
    )
    again = Plan(next=Next.RELAUNCH, why=(because.RankFailed(rank=1, node="b", code=1),))
    stopping = replace(
        saving,
        phase=Phase.STOPPING,
        leaving=replace(saving.leaving, plan=again),
        launch=replace(saving.launch, saving=None, ranks=Ranks.KILLED),
        timers=Timers({Timer.KILL: AT + 60}),
    )
    closing = replace(
        stopping,
        phase=Phase.CLOSING,
        leaving=replace(stopping.leaving, plan=leave),
        launch=stopping.launch.ended(),
        timers=Timers({Timer.WATCHERS_LEAVE: AT + 60}),
    )
    ending = replace(closing, leaving=replace(closing.leaving, plan=replace(leave, next=Next.END)))
    requeueing = replace(closing, phase=Phase.REQUEUEING, timers=Timers({Timer.REQUEUE_TRY: AT + 60}))
    done = replace(requeueing, phase=Phase.DONE, timers=Timers())
    return {
        "starting": starting,
        "starting, a failure is judged": judging,
        "starting, clearing the nodes": clearing,
        "training": training,
        "saving": saving,
        "stopping, to launch again": stopping,
        "closing, to requeue": closing,
        "closing, to end": ending,
        "requeueing": requeueing,
        "done": done,
    }


def _samples() -> dict[str, on.Event]:
    """Return one event of each kind, and a few of those that Slurm's answer distinguishes."""
    job = on.JobFacts(state=on.JobState.RUNNING, slurm_state="RUNNING", restarts=0)
    ending = replace(job, state=on.JobState.COMPLETING, slurm_state="COMPLETING")
    return {
        "Tick, the deadline has passed": on.Tick(at=LATE),
        "PartFailed": on.PartFailed(at=AT, part="diagnosis", error="ValueError: x"),
        "Suspended": on.Suspended(at=AT, seconds=300.0),
        "ClockSet": on.ClockSet(at=AT, seconds=3600.0),
        "SignalReceived TERM": on.SignalReceived(at=AT, signal="TERM"),
        "NodeSignaled": on.NodeSignaled(at=AT, node="a", signal="TERM"),
        "SlurmAnswered: runs": on.SlurmAnswered(at=AT, job=job),
        "SlurmAnswered: preempted": on.SlurmAnswered(at=AT, job=replace(job, preempt_at=AT, end_at=AT + 60.0)),
        "SlurmAnswered: time limit": on.SlurmAnswered(at=AT, job=replace(ending, reason="TimeLimit")),
        "SlurmAnswered: cancelled": on.SlurmAnswered(at=AT, job=ending),
        "SlurmAnswered: requeued by others": on.SlurmAnswered(at=AT, job=replace(ending, restarts=1)),
        "SlurmAnswered: unreachable": on.SlurmAnswered(at=AT, error="unreachable"),
        "RequeueAnswered: yes": on.RequeueAnswered(at=AT, ok=True),
        "RequeueAnswered: no": on.RequeueAnswered(at=AT, ok=False, error="refused"),
        "WatcherReady, the last one": on.WatcherReady(at=AT, node="b", bus=1),
        "WatcherLost": on.WatcherLost(at=AT, node="a", bus=1, why="silent"),
        "BusEnded": on.BusEnded(at=AT, bus=1, code=0),
        "NodesCleared": on.NodesCleared(at=AT, launch=0, address="a", port=29500),
        "NodesCleared, one is not fit": on.NodesCleared(
            at=AT, launch=0, address="a", port=29500, unfit=(on.Unfit(node="b", why="no GPU"),)
        ),
        "NodeFaulted, to be left": _fault(leave=True),
        "NodeFaulted, a hint": _fault(leave=False),
        "Suspected": on.Suspected(at=AT, nodes=("b",)),
        "SlurmdGone": on.SlurmdGone(at=AT, node="b", bus=1, silent_s=8.0),
        "NodesNotCleared": on.NodesNotCleared(at=AT, launch=0, nodes=("b",)),
        "NodesReleased": on.NodesReleased(at=AT, ok=True),
        "NodesChecked, not fit again and again": on.NodesChecked(
            at=AT, nodes=("c",), unfit=(on.Unfit(node="c", why="no GPU"),)
        ),
        "IdleNodes": on.IdleNodes(at=AT, nodes=("d",)),
        "CheckpointChosen": on.CheckpointChosen(at=AT, directory=STEP, step=901),
        "ChoiceFailed": on.ChoiceFailed(at=AT, error="hung"),
        "CheckpointVerified": on.CheckpointVerified(at=AT, directory=STEP, ok=True),
        "StorageTested": on.StorageTested(at=AT, ok=True, bytes=2**22),
        "StorageTested, it is full": on.StorageTested(at=AT, ok=False, problem="No space left on device"),
        "LaunchBegan": on.LaunchBegan(at=AT, launch=0),
        "RankHello": on.RankHello(at=AT, launch=0, rank=0, node="a"),
        "RankExited 0": on.RankExited(at=AT, launch=0, rank=1, node="b", code=0),
        "RankExited 1": on.RankExited(at=AT, launch=0, rank=1, node="b", code=1),
        "RankExited 93": on.RankExited(at=AT, launch=0, rank=1, node="b", code=93),
        "RankExited, exit status unknown": on.RankExited(at=AT, launch=0, rank=1, node="b"),
        "Progressed": on.Progressed(at=AT, launch=0, step=901, tokens=1, loss=1.0, step_seconds=1.0),
        "NodesPaced": on.NodesPaced(at=AT, launch=0, step=901, step_seconds=1.0, own=(("a", 0.9), ("b", 0.9))),
        "Replayed, the same": on.Replayed(at=AT, launch=0, step=905, steps=5, deterministic=True),
        "Replayed, another loss": on.Replayed(
            at=AT, launch=0, step=905, steps=5, first=903, worst=903, then=1.0, now=1.5, deterministic=True
        ),
        "Corrupted": on.Corrupted(at=AT, launch=0, rank=1, node="b", step=900, confirmed=800, what="the loss"),
        "SaveBegan": on.SaveBegan(at=AT, launch=0, step=901, save_id="s1"),
        "CheckpointCommitted, emergency": on.CheckpointCommitted(
            at=AT, launch=0, step=901, save_id="s1", directory=STEP, bytes=1, seconds=1.0, emergency=True
        ),
        "SaveFailed": on.SaveFailed(at=AT, launch=0, step=901, save_id="s1", error="full"),
        "TrainingFinished": on.TrainingFinished(at=AT, launch=0, step=901),
        "TrainingStopped": on.TrainingStopped(at=AT, launch=0, step=901),
        "LaunchEnded, finished": on.LaunchEnded(at=AT, launch=0, code=0, finished=True),
        "LaunchEnded 1": on.LaunchEnded(at=AT, launch=0, code=1),
        "StacksCollected, nobody moves": on.StacksCollected(at=AT, launch=0, moved=False, summary="rank 1 sleeps"),
        "StacksCollected, ranks move": on.StacksCollected(at=AT, launch=0, moved=True, summary="rank 1 evaluates"),
        "Judged, an exception": _judged(Cause.EXCEPTION),
        "Judged, a wrong configuration": _judged(Cause.CONFIGURATION),
        "Judged, a segfault": _judged(Cause.SEGFAULT),
        "RolledBack": on.RolledBack(at=AT, launch=0, directory=STEP, step=901),
        "LaunchRefused": on.LaunchRefused(at=AT, launch=0, error="no srun"),
        "Requested: stop": on.Requested(at=AT, name="ask", kind="stop", by="ada"),
        "RunDirectoryGone": on.RunDirectoryGone(at=AT, path="/runs/a"),
        "Superseded": on.Superseded(at=AT, by_job_id=7, by_restart_count=1),
    }


def _fault(*, leave: bool) -> on.NodeFaulted:
    return on.NodeFaulted(at=AT, node="b", incident="i", name="XID 79", action="drain_reboot", leave=leave, why="lost")


def _judged(cause: Cause) -> on.Judged:
    return on.Judged(at=AT, launch=-1, cause=cause, rule="r", confidence=0.9, node="b")


def page() -> str:
    """Return the page."""
    policy = Policy()
    states = _states()
    edges: dict[tuple[Phase, Phase], dict[str, None]] = {}  # phase before and after -> the kinds of events
    rows = []
    for name, event in _samples().items():
        cells = []
        for state in states.values():
            before = _fitting(state, event)
            decision = decide(before, event, policy)
            cells.append(_cell(before, decision))
            if decision.state.phase is not before.phase:
                edges.setdefault((before.phase, decision.state.phase), {})[type(event).__name__] = None
        rows.append([name, *cells])
    header = f"| {' | '.join(['event', *states])} |\n{'|---' * (len(states) + 1)}|"
    return "\n".join([_HEAD, *_diagram(edges), _TABLE, header, *(f"| {' | '.join(row)} |" for row in rows), ""])


def _diagram(edges: Mapping[tuple[Phase, Phase], Iterable[str]]) -> Iterator[str]:
    yield "```mermaid"
    yield "stateDiagram-v2"
    yield f"    [*] --> {Phase.STARTING.value}"
    for (before, after), kinds in edges.items():
        yield f"    {before.value} --> {after.value}: {', '.join(kinds)}"
    yield f"    {Phase.DONE.value} --> [*]"
    yield "```"


def _fitting(state: State, event: on.Event) -> State:
    """Return the state in which such an event comes: an answer where it was asked for."""
    if isinstance(event, on.RequeueAnswered):
        return state.waiting(Timer.REQUEUE_ANSWER, AT + 60)
    return replace(
        state,
        query=replace(state.query, question=Question.ASKED if isinstance(event, on.SlurmAnswered) else None),
        silence=replace(state.silence, looking=isinstance(event, on.StacksCollected)),
        resume=replace(
            state.resume, choice=Choice.ROLLING_BACK if isinstance(event, on.RolledBack) else state.resume.choice
        ),
        nodes=replace(state.nodes, growth=_RESTS if isinstance(event, on.NodesChecked) else state.nodes.growth),
        storage=replace(state.storage, verifying=STEP if isinstance(event, on.CheckpointVerified) else None),
        watchers=replace(
            state.watchers, ready=frozenset("a") if isinstance(event, on.WatcherReady) else state.watchers.ready
        ),
    )


def _cell(before: State, decision: Decision) -> str:
    words = [] if decision.state.phase is before.phase else [f"-> {decision.state.phase.value}"]
    words += [type(effect).__name__ for effect in decision.effects]
    return ", ".join(words) or "."
