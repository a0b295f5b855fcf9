"""Plays a scenario through `decide`, and prints what it decided.

A scenario is a comment with the story, then one event a line (`SECONDS Event key=value ...`).  After each stands what
comes of it: `> .` where nothing does, else the phase, what of the state matters, the reason, and the orders.  Lines
with `>` are made anew.  What an event leaves out is filled in: from the state (the newest launch and bus), else with
something usual (node `a`).  `given training step=900` plays the usual start first (`words=40`: and so many messages of
steps up to that one, each of a second and a loss of 1), `policy name=value` changes a limit.
"""

from __future__ import annotations

import ast
import shlex
import typing
from collections.abc import Iterator
from typing import Any

import msgspec

from stepkeeper.core import events as on
from stepkeeper.core.decide import decide
from stepkeeper.core.phases import Decision
from stepkeeper.core.policy import Policy
from stepkeeper.core.reasons import Plain, Reason, Why
from stepkeeper.core.state import Phase, State, Timer
from stepkeeper.reason_text import tag

EVENTS: dict[str, Any] = {kind.__name__: kind for kind in typing.get_args(on.Event)}
STATES = {"PENDING": "pending", "RUNNING": "running", "COMPLETING": "completing", "CANCELLED": "ended"}
DEFAULTS: dict[str, dict[str, Any]] = {
    "AttemptStarted": {
        "job_id": 7,
        "restart_count": 0,
        "attempt": 0,
        "nodes": ["a", "b"],
        "batch_node": "a",
        "kill_wait_s": 30.0,
    },
    "PartFailed": {"part": "diagnosis", "error": "ValueError: not a number"},
    "Suspended": {"seconds": 300.0},
    "ClockSet": {"seconds": 3600.0},
    "SignalReceived": {"signal": "TERM"},
    "NodeSignaled": {"node": "a", "signal": "TERM"},
    "RequeueAnswered": {"ok": True},
    "WatcherReady": {"node": "a"},
    "WatcherLost": {"node": "a", "why": "silent for 12 s"},
    "BusEnded": {"code": 0},
    "NodesCleared": {"address": "a", "port": 29500},
    "NodeFaulted": {
        "node": "b",
        "incident": "i1",
        "name": "XID 79",
        "action": "drain_reboot",
        "leave": True,
        "why": "the GPU has left the bus",
    },
    "NodesReleased": {"ok": True},
    "NodesChecked": {"nodes": ["b"]},
    "CheckpointChosen": {"directory": None, "step": None},
    "ChoiceFailed": {"error": "checkpoints: Input/output error"},
    "CheckpointVerified": {"ok": True},
    "StorageTested": {"ok": True, "bytes": 4194304, "write_s": 0.02, "read_s": 0.01, "from_disk": True},
    "StacksCollected": {"moved": False, "summary": "rank 1 is in load (data.py:7); rank 0 waits in all_reduce"},
    "Requested": {"name": "ask-1", "by": "ada"},
    "RankHello": {"rank": 0, "node": "a"},
    "RankExited": {"rank": 1, "node": "b"},
    "Progressed": {"tokens": 0, "loss": 1.0, "step_seconds": 1.0},
    "Replayed": {"step": 20, "steps": 10},
    "Corrupted": {"rank": 1, "node": "b", "step": 40, "confirmed": 20, "what": "the loss", "gpu": "GPU 1"},
    "NodesPaced": {"step": 1, "step_seconds": 1.0},
    "SaveBegan": {"save_id": "s1"},
    "CheckpointCommitted": {"save_id": "s1", "bytes": 1, "seconds": 1.0},
    "SaveFailed": {"save_id": "s1", "error": "No space left on device"},
    "LaunchEnded": {"code": 0},
    "LaunchRefused": {"error": "srun: No such file or directory"},
    "Judged": {"cause": "unknown", "rule": "no-evidence", "confidence": 0.9},
    "RunDirectoryGone": {"path": "/runs/a"},
    "Superseded": {"by_job_id": 7, "by_restart_count": 1},
}
GIVEN_TRAINING = """
0 AttemptStarted
1 WatcherReady node=a
1 WatcherReady node=b
2 CheckpointChosen
3 NodesCleared
5 RankHello
"""


class ScenarioError(ValueError):
    """A line cannot be played: says which, and why."""


def play(text: str) -> str:
    """Return the scenario with what `decide` makes of it today.

    Raises:
        ScenarioError: a line cannot be played.
    """
    state, policy = State(), Policy()
    out: list[str] = []
    for number, line in enumerate(text.splitlines(), start=1):
        if line.startswith(">"):
            continue
        out.append(line)
        if not line.strip() or line.startswith("#"):
            continue
        try:
            if line.startswith("given training"):
                state = given_training(line)
            elif line.startswith("policy "):
                policy = _limits(line, policy)
            else:
                decision = decide(state, parse(line, state), policy)
                out += describe(state, decision)
                state = decision.state
        except (ValueError, msgspec.ValidationError) as error:
            raise ScenarioError(f"line {number}: `{line}`: {error}") from error
    return "\n".join(out) + "\n"


def given_training(line: str = "given training") -> State:
    """Play the usual start, and a step, or several, if the line names one.  Raises ValueError."""
    words = dict(_pair(word) for word in line.split()[2:])
    state = State()
    for start in GIVEN_TRAINING.strip().splitlines():
        state = decide(state, parse(start, state), Policy()).state
    if "step" in words:
        newest = int(words["step"])
        for step in range(newest - int(words.get("words", 1)) + 1, newest + 1):
            state = decide(state, parse(f"9 Progressed step={step}", state), Policy()).state
    return state


def parse(line: str, state: State) -> on.Event:
    """Return the event of a line.

    >>> parse("60 WatcherReady node=b", State(bus=3)).bus
    3

    Raises:
        ValueError: it is no event.
        msgspec.ValidationError: a field is missing or does not fit.
    """
    at, name, *words = shlex.split(line)
    if name not in EVENTS:
        raise ValueError(f"no event {name}; there are {', '.join(sorted(EVENTS))}")
    kind = EVENTS[name]
    names = kind.__struct_fields__
    given = {key: _value(value) for key, value in (_pair(word) for word in words)}
    given |= {key: given[key] == "yes" for key in given if given[key] in ("yes", "no") and _is_flag(kind, key)}
    fields = _job(given) if name == "SlurmAnswered" and "error" not in given else _structures(given)
    if unknown := sorted(set(fields) - set(names)):
        raise ValueError(f"{name} has no {', '.join(unknown)}; it has {', '.join(names)}")
    implied = {
        key: value for key, value in {"launch": state.launch.number, "bus": state.watchers.bus}.items() if key in names
    }
    if name == "Judged":
        implied["launch"] = state.launch.number - 1  # the launch before
    if name == "CheckpointCommitted" and isinstance(fields.get("step"), int):
        fields.setdefault("directory", f"step_{fields['step']:08d}")
    event: on.Event = msgspec.convert({**implied, **DEFAULTS.get(name, {}), **fields, "at": float(at)}, kind)
    return event


def _is_flag(kind: Any, key: str) -> bool:
    return typing.get_type_hints(kind).get(key) is bool


def _structures(given: dict[str, Any]) -> dict[str, Any]:
    """Return the fields, with the short forms of lists written out: `unfit=b:clock,c:storage`."""
    fields = dict(given)
    if "skipped" in fields:
        fields["skipped"] = [
            {"directory": directory, "problem": problem, "damaged": "wrong" in problem}
            for directory, problem in _pairs(fields["skipped"])
        ]
    if "unfit" in fields:
        fields["unfit"] = [
            {"node": node, "why": why, "shared": why == "storage"} for node, why in _pairs(fields["unfit"])
        ]
    if "excluded" in fields:
        fields["excluded"] = [
            {"node": node, "why": "XID 79", "until": float(until)} for node, until in _pairs(fields["excluded"])
        ]
    if "tried" in fields:
        cause, place, count, step = str(fields["tried"]).split(":")
        fields["tried"] = [{"cause": cause, "place": place, "count": int(count), "step": int(step)}]
    if "own" in fields:
        fields["own"] = [[node, float(seconds)] for node, seconds in _pairs(fields["own"])]
    for name in ("nodes", "nodes_before"):
        if isinstance(fields.get(name), str):
            fields[name] = fields[name].split(",")
    return fields


def _job(given: dict[str, Any]) -> dict[str, Any]:
    slurm_state = str(given.get("state", "RUNNING"))
    if slurm_state not in STATES:
        raise ValueError(f"state={slurm_state}: one of {', '.join(STATES)}")
    known = {"state", "restarts", "reason", "preempt", "end", "requeue"}
    if unknown := sorted(set(given) - known):
        raise ValueError(f"SlurmAnswered has no {', '.join(unknown)}; it has {', '.join(sorted(known))}, or error")
    job = {
        "state": STATES[slurm_state],
        "slurm_state": slurm_state,
        "restarts": given.get("restarts", 0),
        "reason": given.get("reason", "None"),
        "preempt_at": given.get("preempt"),
        "end_at": given.get("end", 100000.0),
        "requeue_allowed": given.get("requeue", True),
    }
    return {"job": job}


def _limits(line: str, policy: Policy) -> Policy:
    limits = {key: _value(value) for key, value in (_pair(word) for word in shlex.split(line)[1:])}
    return msgspec.convert({**msgspec.structs.asdict(policy), **limits}, Policy)


def _pair(word: str) -> tuple[str, str]:
    key, equals, value = word.partition("=")
    if not equals:
        raise ValueError(f"`{word}` is not key=value")
    return key, value


def _pairs(text: object) -> list[tuple[str, str]]:
    found = [(first, second) for first, _, second in (word.partition(":") for word in str(text).split(","))]
    if not all(second for _, second in found):
        raise ValueError(f"`{text}`: write name:what, and a comma between several")
    return found


def _value(word: str) -> Any:
    try:
        return ast.literal_eval(word)
    except (ValueError, SyntaxError):
        return word


_SHOWN = (Timer.STORAGE_TEST, Timer.STORAGE_RETRY)


def describe(before: State, decision: Decision) -> Iterator[str]:
    """Yield what came of an event; `> .` where nothing did."""
    state, wait = decision.state, decision.state.timers.wait
    if state == before and not decision.effects:
        yield "> ."
        return
    shown = {
        "launch": state.launch.number or None,
        **({wait.value: state.deadline_at} if wait is not None else {}),
        **({each.value: state.timers.get(each) for each in _SHOWN} if state.phase is Phase.STARTING else {}),
        "plan": state.leaving.plan.next.value if state.leaving.plan is not None else None,
        "failures": state.budgets.failures or None,
        "lost": state.budgets.node_losses or None,
        "asking": state.query.asking or None,
    }
    words = [f"{name}={_show(value)}" for name, value in shown.items() if value is not None]
    why = f"  # {_reasons(decision.why)}" if decision.why else ""
    yield " ".join([f"> {state.phase.value}", *words]) + why
    for effect in decision.effects:
        fields: dict[str, object] = msgspec.structs.asdict(effect)
        reasons = getattr(effect, "reasons", ())
        fields |= {"reasons": _reasons(reasons) if reasons != decision.why else ""} if reasons else {}
        words = [f"{name}={_show(value)}" for name, value in fields.items() if value not in (None, ()) and value != ""]
        yield " ".join([">   ->", type(effect).__name__, *words])


def _reasons(why: Why) -> str:
    """Return reasons with their facts, and without a sentence."""
    return "; ".join(" ".join([tag((each,)), *_facts(each)]) for each in why)


def _facts(reason: Reason) -> Iterator[str]:
    if isinstance(reason, Plain):
        return  # its name says it
    facts: dict[str, object] = msgspec.structs.asdict(reason)
    for field in msgspec.structs.fields(reason):
        if facts[field.name] != field.default:
            yield f"{field.name}={_show(facts[field.name])}"


def _show(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, tuple) and value and not isinstance(value[0], msgspec.Struct):
        return _show(",".join(str(each) if not isinstance(each, tuple) else ":".join(map(str, each)) for each in value))
    if isinstance(value, float):
        return f"{value:g}"
    text = str(value)
    return repr(text) if " " in text else text
