"""Plays a scenario file through `decide` and prints what it decided.

A scenario is a comment with the story, then one event a line (`SECONDS Event key=value ...`), each followed
by what must come of it.  What an event leaves out is filled in from the state: the newest launch and bus,
node `a`.  `given training step=900` plays the usual start first, `policy name=value` changes a limit.
"""

from __future__ import annotations

import ast
import shlex
from collections.abc import Iterator

import msgspec

from stepkeeper.core import events as on
from stepkeeper.core.causes import Cause, Tried
from stepkeeper.core.decide import decide
from stepkeeper.core.phases import Decision
from stepkeeper.core.policy import Policy
from stepkeeper.core.state import State

NODES = ("a", "b")
POLICY = Policy()
STATES = {
    "PENDING": on.JobState.PENDING,
    "RUNNING": on.JobState.RUNNING,
    "COMPLETING": on.JobState.COMPLETING,
    "CANCELLED": on.JobState.ENDED,
}
DEFAULTS = {
    on.AttemptStarted: {
        "job_id": 7,
        "restart_count": 0,
        "attempt": 0,
        "nodes": NODES,
        "batch_node": "a",
        "kill_wait_s": 30.0,
    },
    on.SignalReceived: {"signal": "TERM"},
    on.NodeSignaled: {"node": "a", "signal": "TERM"},
    on.RequeueAnswered: {"ok": True},
    on.WatcherReady: {"node": "a"},
    on.WatcherLost: {"node": "a", "why": "silent for 12 s"},
    on.BusEnded: {"code": 0},
    on.NodesCleared: {"address": "a", "port": 29500},
    on.NodeFaulted: {
        "node": "b",
        "incident": "i1",
        "name": "XID 79",
        "action": "drain_reboot",
        "leave": True,
        "why": "the GPU has left the bus",
    },
    on.NodesReleased: {"ok": True},
    on.CheckpointChosen: {"directory": None, "step": None},
    on.ChoiceFailed: {"error": "checkpoints: Input/output error"},
    on.CheckpointVerified: {"ok": True},
    on.StorageTested: {"ok": True, "bytes": 4194304, "write_s": 0.02, "read_s": 0.01, "from_disk": True},
    on.Asked: {"name": "ask-1", "by": "ada"},
    on.RankHello: {"rank": 0, "node": "a"},
    on.RankExited: {"rank": 1, "node": "b"},
    on.Progressed: {"tokens": 0, "loss": 1.0, "step_seconds": 1.0},
    on.SaveBegan: {"save_id": "s1"},
    on.CheckpointCommitted: {"save_id": "s1", "bytes": 1, "seconds": 1.0},
    on.SaveGaveUp: {"save_id": "s1", "error": "No space left on device"},
    on.LaunchEnded: {"code": 0},
    on.LaunchRefused: {"error": "srun: No such file or directory"},
    on.Judged: {"cause": "unknown", "rule": "no-evidence", "confidence": 0.9},
    on.RolledBack: {},
    on.StacksCollected: {"moved": False, "summary": "rank 1 is in load (data.py:7); rank 0 waits in all_reduce"},
    on.Superseded: {"by_job_id": 7, "by_restart_count": 1},
}
GIVEN_TRAINING = """
0 AttemptStarted
1 WatcherReady node=a
1 WatcherReady node=b
2 CheckpointChosen
3 NodesCleared
5 RankHello
"""


def play(text: str) -> str:
    """Return the scenario with what `decide` makes of it today."""
    state, policy = State(), POLICY
    lines: list[str] = []
    for line in text.splitlines():
        if line.startswith(">"):
            continue
        lines.append(line)
        if not line.strip() or line.startswith("#"):
            continue
        if line.startswith("given training"):
            state = given_training(line)
            continue
        if line.startswith("policy"):
            limits = {key: _value(value) for key, value in (word.split("=") for word in line.split()[1:])}
            policy = msgspec.structs.replace(policy, **limits)
            continue
        event = parse(line, state)
        decision = decide(state, event, policy)
        lines += describe(state, decision)
        state = decision.state
    return "\n".join(lines) + "\n"


def given_training(line: str = "given training") -> State:
    """Play the usual start, and a step if the line names one."""
    words = dict(word.split("=") for word in line.split()[2:])
    state = State()
    for start in GIVEN_TRAINING.strip().splitlines():
        state = decide(state, parse(start, state), POLICY).state
    if "step" in words:
        event = parse(f"9 Progressed step={words['step']}", state)
        state = decide(state, event, POLICY).state
    return state


def parse(line: str, state: State) -> on.Event:
    """Return the event of a line.

    >>> parse("60 WatcherReady node=b", State(bus=3)).bus
    3
    """
    at, name, *words = shlex.split(line)
    kind = getattr(on, name)
    fields = {key: _value(value) for key, _, value in (word.partition("=") for word in words)}
    if kind is on.SlurmAnswered and "error" not in fields:
        fields = {"job": _job(fields)}
    if kind is on.CheckpointCommitted:
        fields.setdefault("directory", f"step_{fields['step']:08d}")
    if kind is on.CheckpointChosen and "skipped" in fields:
        problems = [word.split(":") for word in fields["skipped"].split(",")]
        fields["skipped"] = tuple(on.Skipped(directory=d, problem=p, damaged="wrong" in p) for d, p in problems)
    if "unfit" in fields:
        problems = [word.split(":") for word in fields["unfit"].split(",")]
        fields["unfit"] = tuple(on.Unfit(node=node, why=why, shared=why == "storage") for node, why in problems)
    if isinstance(fields.get("nodes"), str):
        fields["nodes"] = tuple(fields["nodes"].split(","))
    if "excluded" in fields:
        bad = [word.split(":") for word in fields["excluded"].split(",")]
        fields["excluded"] = tuple(on.Exclusion(node=node, why="XID 79", until=float(until)) for node, until in bad)
    if kind is on.Judged:
        fields = {**DEFAULTS[kind], "launch": state.launch - 1, **fields}  # of the launch before
        fields["cause"] = Cause(fields["cause"])
    if "tried" in fields:
        cause, place, count, step = fields["tried"].split(":")
        fields["tried"] = (Tried(cause=Cause(cause), place=place, count=int(count), step=int(step)),)
    names = kind.__struct_fields__
    known = {"launch": state.launch, "bus": state.bus}
    implied = {key: value for key, value in known.items() if key in names}
    return kind(at=float(at), **{**implied, **DEFAULTS.get(kind, {}), **fields})


def _job(fields: dict[str, object]) -> on.JobFacts:
    slurm_state = str(fields.get("state", "RUNNING"))
    return on.JobFacts(
        state=STATES[slurm_state],
        slurm_state=slurm_state,
        restarts=fields.get("restarts", 0),
        reason=fields.get("reason", "None"),
        preempt_at=fields.get("preempt"),
        end_at=fields.get("end", 100000.0),
        requeue_allowed=fields.get("requeue", True),
    )


def _value(word: str) -> object:
    try:
        return ast.literal_eval(word)
    except (ValueError, SyntaxError):
        return word


def describe(before: State, decision: Decision) -> Iterator[str]:
    """Yield the expectation lines of a decision; `> .` where nothing came of the event."""
    state = decision.state
    if state == before and not decision.effects:
        yield "> ."
        return
    shown = {
        "launch": state.launch or None,
        "deadline": state.deadline_at,
        "plan": state.plan.next.value if state.plan is not None else None,
        "failures": state.failures or None,
        "lost": state.node_losses or None,
        "asking": state.asking or None,
    }
    words = [f"{name}={_show(value)}" for name, value in shown.items() if value is not None]
    why = f"  # {decision.why}" if decision.why else ""
    yield " ".join([f"> {state.phase.value}", *words]) + why
    for effect in decision.effects:
        fields = msgspec.structs.asdict(effect)
        told = [f"{name}={_show(value)}" for name, value in fields.items() if value not in (None, ()) and value != ""]
        yield " ".join([">   ->", type(effect).__name__, *told])


def _show(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:g}"
    text = str(value)
    return repr(text) if " " in text else text
