"""Names that journals of earlier releases use: read as the names of today.

Releases up to 0.1 gave some events, effects and fields other names.  A record of theirs is translated before it is
decoded.  A record of today costs one search; the few that use such a name elsewhere are decoded twice.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

EVENTS = {"stood_still": "suspended", "asked": "requested", "save_gave_up": "save_failed"}
EFFECTS = {
    "call_person": "notify_user",
    "tell_slow_node": "report_slow_node",
    "tell_slow_launch": "report_slow_launch",
    "tell_replay": "report_replay",
    "answer_ask": "answer_request",
}
FIELDS = {
    "usual": "baseline",
    "left_out": "skipped_data",
    "otherwise": "second_cause",
}  # of records, events and effects
STATE = FIELDS | {  # of the state, in `missed`
    "told": "eviction_confirmed",
    "heard": "library_seen",
    "begun": "all_tasks_started",
    "charged": "failure_counted",
    "doubt": "slurm_reachability",
    "otherwise": "fallback_plan",
}
REASONS: dict[str, dict[str, object]] = {  # merged before 0.2: what each is now, and its fact
    "save_late": {"reason": "late", "timer": "save"},
    "ranks_late": {"reason": "late", "timer": "ranks_leave"},
    "step_survives_kill": {"reason": "late", "timer": "kill"},
    "closing_late": {"reason": "late", "timer": "watchers_leave"},
    "clearing_late": {"reason": "late", "timer": "clearing"},
    "choosing_late": {"reason": "late", "timer": "checkpoint_choice"},
    "cause_late": {"reason": "late", "timer": "cause"},
    "launch_never_began": {"reason": "late", "timer": "tasks_started"},
    "storage_test_late": {"reason": "late", "timer": "storage_test"},
    "slurm_late": {"reason": "late", "timer": "slurm_answer"},
    "requeue_late": {"reason": "late", "timer": "requeue_end"},
    "requeue_asked": {"reason": "slurm_asked", "about": "requeue"},
    "save_limit_asked": {"reason": "slurm_asked", "about": "save"},
    "nodes_taken_back": {"reason": "resting_nodes", "are": "used"},
    "fit_again": {"reason": "resting_nodes", "are": "fit"},
    "checks_unanswered": {"reason": "resting_nodes", "are": "unanswered"},
    "resting_given_back": {"reason": "resting_nodes", "are": "given_back"},
    "resting_checked": {"reason": "resting_nodes", "are": "checked"},
    "node_given_back": {"reason": "resting_nodes", "are": "given_back", "nodes": []},
    "save_asked": {"reason": "requested", "kind": "save"},
    "stop_asked": {"reason": "requested", "kind": "stop"},
    "steps_signaled": {"reason": "got_signal", "signal": "TERM"},
    "signal_since_asked": {"reason": "asked_again"},
    "suspended_since_asked": {"reason": "asked_again", "suspended": True},
    "still_unfit": {"reason": "node_unfit", "again": True},
    "same_failures": {"reason": "failures_max", "same": True},
    "perhaps_at_work": {"reason": "still_moves", "early": True},
    "nodes_not_released": {"reason": "nodes_released"},
    "idle_unknown": {"reason": "idle_nodes"},
}
RULES = {  # of a diagnosis
    "loader-told-to-end": "loader-terminated",
    "told-to-end": "terminated",
    "exit-told": "exit-terminated",
    "limit-told": "limit-notice",
}
_OLD = re.compile(b'"(?:' + "|".join({*EVENTS, *EFFECTS, *STATE, *REASONS, *RULES}).encode() + b')"')


def translate(data: bytes) -> bytes:
    """Return a line of the journal with the names of today.

    >>> translate(b'{"event":{"event":"asked","at":1},"usual":{}}')
    b'{"event":{"event":"requested","at":1},"baseline":{}}'

    Raises:
        msgspec.MsgspecError: it is no JSON.
    """
    if not _OLD.search(data):
        return data
    record = msgspec.json.decode(data)
    if not isinstance(record, dict):
        return data
    record = _reasons(_renamed(record, FIELDS))
    if isinstance(event := record.get("event"), dict):
        record["event"] = _tagged(event, "event", EVENTS)
    if isinstance(effects := record.get("effects"), list):
        record["effects"] = [_tagged(each, "effect", EFFECTS) if isinstance(each, dict) else each for each in effects]
    if isinstance(missed := record.get("missed"), dict):
        record["missed"] = _renamed(missed, STATE)
    return msgspec.json.encode(_rules(record))


def _tagged(value: dict[str, Any], field: str, tags: dict[str, str]) -> dict[str, Any]:
    """Rename what stands in an event or effect, and its tag."""
    value = _renamed(value, FIELDS)
    tag = value.get(field)
    return value | {field: tags[tag]} if isinstance(tag, str) and tag in tags else value


def _renamed(value: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    return {names.get(key, key): each for key, each in value.items()}


def _rules(value: Any) -> Any:
    """Rename rules of the diagnosis, wherever they are."""
    match value:
        case dict():
            return {
                key: RULES.get(each, each) if key == "rule" and isinstance(each, str) else _rules(each)
                for key, each in value.items()
            }
        case list():
            return [_rules(each) for each in value]
        case _:
            return value


def _reasons(value: Any) -> Any:
    """Rename reasons, wherever they are."""
    match value:
        case {"reason": str(tag), **facts}:
            named = {FIELDS.get(str(key), key): each for key, each in facts.items()}
            return {**named, **REASONS.get(tag, {"reason": tag})}
        case dict():
            return {key: _reasons(each) for key, each in value.items()}
        case list():
            return [_reasons(each) for each in value]
        case _:
            return value
