"""Histories for the property tests, and what is made of them: here arbitrary ones, realistic ones in `realistic`."""

from __future__ import annotations

import msgspec
from hypothesis import strategies as st

from stepkeeper.core import effects as do
from stepkeeper.core import events as on
from stepkeeper.core import reasons as because
from stepkeeper.core.causes import Cause
from stepkeeper.core.decide import decide
from stepkeeper.core.phases import Decision
from stepkeeper.core.policy import Policy
from stepkeeper.core.state import State
from tests.core.beginnings import BEGINNINGS, NODES


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


small = st.integers(0, 3)
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
_launch = {"launch": small}
_unfit = st.builds(on.Unfit, node=_nodes, why=st.just("clock"), shared=st.booleans())
_save = {"step": small, "save_id": st.sampled_from("xy"), "emergency": st.booleans()}
_directory = st.sampled_from(("step_1", "step_2"))
_damaged = tuple(on.Skipped(directory=name, problem="wrong", damaged=True) for name in ("step_3", "step_4"))
skipped = st.sampled_from(((), (), _damaged[:1], _damaged))
FIELDS = {
    on.Tick: {},
    on.PartFailed: {"part": st.just("diagnosis"), "error": st.just("ValueError: x")},
    on.Suspended: {"seconds": st.sampled_from((6.0, 300.0))},
    on.ClockSet: {"seconds": st.sampled_from((-3600.0, 3.0, 3600.0))},
    on.SignalReceived: {"signal": st.sampled_from(("TERM", "INT", "USR1", "USR2"))},
    on.NodeSignaled: {"node": _nodes, "signal": st.just("TERM")},
    on.SlurmAnswered: {"job": st.none() | jobs, "error": st.just("unreachable")},
    on.RequeueAnswered: {"ok": st.booleans(), "error": st.just("refused")},
    on.WatcherReady: {"node": _nodes, "bus": small, "switches": st.sampled_from(("", "top.leaf1", "top.leaf2"))},
    on.WatcherLost: {"node": _nodes, "bus": small, "why": st.just("silent")},
    on.Suspected: {"nodes": st.sampled_from((("a",), ("b",), ("a", "b"))), "rank": st.none() | small},
    on.SlurmdGone: {"node": _nodes, "bus": small, "silent_s": st.just(8.0)},
    on.BusEnded: {"bus": small, "code": small},
    on.NodesCleared: {
        **_launch,
        "address": st.just("a"),
        "port": st.just(1),
        "nodes": st.sampled_from(((), (), ("a",), ("a", "b"))),
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
    on.CheckpointChosen: {"directory": st.none() | _directory, "step": st.none() | small, "skipped": skipped},
    on.ChoiceFailed: {"error": st.just("hung")},
    on.CheckpointVerified: {"directory": _directory, "ok": st.booleans()},
    on.StorageTested: {
        "ok": st.sampled_from((True, True, True, False)),
        "untrue": st.sampled_from((False, False, True)),
        "thorough": st.booleans(),
    },
    on.LaunchBegan: {**_launch},
    on.RankHello: {
        **_launch, "rank": small, "node": _nodes, "unable": st.sampled_from(("", "", "", "another version")),
    },
    on.RankExited: {
        **_launch,
        "rank": small,
        "node": _nodes,
        "code": st.none() | st.sampled_from((0, 1, 75, 93)),
        "signal": st.none() | st.sampled_from((9, 15)),
    },
    on.Progressed: {
        **_launch, "step": small, "tokens": small, "loss": st.just(1.0), "step_seconds": st.none() | st.just(1.0),
        "not_finite": st.sampled_from((False, False, False, True)),
    },
    on.NodesPaced: {
        **_launch, "step": small, "step_seconds": st.just(1.0), "own": st.sampled_from(
            ((("a", 0.5), ("b", 0.5)), (("a", 0.5), ("b", 0.9)), (("a", 0.5),), (("stranger", 0.9), ("b", 0.0)))
        ),
    },
    on.Replayed: {
        **_launch, "step": small, "steps": st.integers(1, 3), "worst": st.none() | small,
        "then": st.none() | st.just(1.0), "now": st.just(1.5), "deterministic": st.booleans(),
    },
    on.Corrupted: {
        **_launch, "rank": small, "node": _nodes, "step": small, "confirmed": small, "what": st.just("the loss"),
    },
    on.SaveBegan: {**_launch, **_save},
    on.CheckpointCommitted: {
        **_launch, **_save, "directory": _directory, "bytes": small, "seconds": st.sampled_from((1.0, 300.0)),
        "by_disk": st.booleans(),
    },
    on.SaveFailed: {**_launch, **_save, "error": st.just("full")},
    on.TrainingFinished: {**_launch, "step": small},
    on.TrainingStopped: {**_launch, "step": small},
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
        "rule": st.sampled_from(("rule-1", "rule-1", "rule-1", "rule-2")),
        "confidence": st.sampled_from((0.3, 0.9)),
        "location": st.sampled_from(("", "", "", "ValueError at train.py:1")),
        "node": st.sampled_from(("", *NODES)),
        "step": st.sampled_from((None, None, 2, 2, 3, 0)),
    },
    on.StacksCollected: {
        **_launch,
        "moved": st.booleans(),
        "summary": st.just("rank 1 sleeps"),
        "sure_s": st.sampled_from((0.0, 0.0, 60.0, 1e9)),
        "awaited": st.booleans(),
        "node": st.sampled_from(("", *NODES)),
    },
    on.RolledBack: {**_launch, "directory": _directory, "step": small, "error": st.sampled_from(("", "", "full"))},
    on.Requested: {
        "name": st.sampled_from(("ask-1", "ask-2")),
        "kind": st.sampled_from(("save", "stop")),
        "by": st.just("ada"),
    },
    on.RunDirectoryGone: {"path": st.just("/runs/a")},
    on.Superseded: {"by_job_id": st.just(7), "by_restart_count": st.just(1)},
    on.AttemptStarted: {
        "job_id": st.just(7),
        "restart_count": st.just(0),
        "attempt": st.just(0),
        "nodes": st.just(NODES),
        "batch_node": st.just("a"),
        "kill_wait_s": st.just(30.0),
        "finished_step": st.none() | small,
        "wrapped": st.booleans(),
        "nodes_wanted": st.integers(0, 2),
        "nodes_min": st.integers(0, 2),
        "end_at": _optional_time,
        "batch": st.booleans(),
    },
}  # fmt: skip


def _event(kind: type) -> st.SearchStrategy[on.Event]:
    return st.builds(kind, at=st.just(0.0), **FIELDS[kind])


any_event = st.one_of([_event(kind) for kind in FIELDS])
pauses = st.sampled_from((0.0, 0.0, 0.01, 1.0, 5.0, 20.0, 200.0))


_FAULT = because.NodeFault(node="x", name="XID 79", text="off the bus")
_excluded = st.sampled_from(  # in attempts before
    [
        tuple(
            on.Exclusion(node=node, reasons=(why,), until=300.0 + number)
            for why, nodes in ((because.LostRecently(), lost), (_FAULT, faulty))
            for number, node in enumerate(nodes)
        )
        for lost, faulty in (
            ("", ""),
            ("b", ""),
            ("", "b"),
            ("", "c"),
            ("c", "b"),
            ("x", "a"),
            ("", "bc"),
            ("x", "abc"),
        )
    ]
)
_node_counts = st.sampled_from(((), (1, 2), (2,), (1, 3), (2, 3)))


@st.composite
def begun(draw: st.DrawFn, beginnings: tuple[tuple[on.Event, ...], ...]) -> list[on.Event]:
    """Return a beginning; one in eight knows of bad nodes, or has a batch that not every number of nodes divides."""
    first, *others = draw(st.sampled_from(beginnings))
    if draw(st.integers(0, 7)) == 0:
        first = msgspec.structs.replace(first, node_counts=draw(_node_counts), excluded=draw(_excluded))
    return [first, *others]


@st.composite
def arbitrary(draw: st.DrawFn, size_max: int = 40) -> list[on.Event]:
    """Return any events at all in any order, after any beginning; time alone goes forward."""
    events = draw(begun(BEGINNINGS))
    at = 0.0
    for event, pause in draw(st.lists(st.tuples(any_event, pauses), max_size=size_max)):
        at += pause
        events.append(msgspec.structs.replace(event, at=at))
    return events
