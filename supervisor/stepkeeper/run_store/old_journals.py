"""Journals of releases up to 0.1, read as those of today: their names (`translate`), then their sentences (`record`).

Releases up to 0.1 gave some events, effects and fields other names.  A record of theirs is translated before it is
decoded.  A record of today costs one search; the few that use such a name elsewhere are decoded twice.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import msgspec

from stepkeeper.core import reasons as because
from stepkeeper.core.causes import Notice
from stepkeeper.core.losses import DISCONTINUITY, NOT_FINITE, SPIKE

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
    **{fact.value: {"reason": "plain", "fact": fact.value} for fact in because.Fact},
    "storage_unusable": {"reason": "failed", "what": "list_checkpoints"},
    "launch_refused": {"reason": "failed", "what": "launch"},
    "no_way_back": {"reason": "failed", "what": "roll_back"},
    "requeue_not_allowed": {"reason": "failed", "what": "requeue"},
    "job_refused": {"reason": "failed", "what": "submit"},
    "node_left_for": {"reason": "node_is", "state": "suspect"},
    "node_drained": {"reason": "node_is", "state": "drained"},
    "node_not_clear": {"reason": "node_is", "state": "not_clear"},
    "keeps_up": {"reason": "node_is", "state": "keeping_up"},
    "checkpoint_verified": {"reason": "checkpoint_read", "result": "verified"},
    "checkpoint_damaged": {"reason": "checkpoint_read", "result": "damaged"},
    "checkpoint_removed": {"reason": "checkpoint_read", "result": "removed"},
    "finished_earlier": {"reason": "training_finished", "earlier": True},
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
_NAMES, _TAGS = ("|".join(names).encode() for names in ({*EVENTS, *EFFECTS, *STATE, *RULES}, REASONS))
_OLD = re.compile(b'"reason":"(?:%b)"|"(?:%b)"' % (_TAGS, _NAMES))


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
        case {"effect": _}:  # its `reason` is its words
            return {key: _reasons(each) for key, each in value.items()}
        case {"reason": str(tag), **facts}:
            named = {FIELDS.get(str(key), key): each for key, each in facts.items()}
            return {**named, **REASONS.get(tag, {"reason": tag})}
        case dict():
            return {key: _reasons(each) for key, each in value.items()}
        case list():
            return [_reasons(each) for each in value]
        case _:
            return value


# Release 0.1 knew reasons as sentences only: they are read as typed ones.  Nothing else knows these sentences.
#
# What nothing depends on stays a sentence (`Sentence`).

LOST = "it was lost"
RELAUNCH = "relaunch: "
_NOTICES = {
    "preempted": Notice.PREEMPTED,
    "time limit": Notice.TIME_LIMIT,
    "requeued by Slurm or an admin": Notice.REQUEUED,
    "cancelled": Notice.CANCELLED,
    "asked to save": Notice.ASKED_TO_SAVE,
    "nothing that ends the job": Notice.NOT_FOR_US,
}
_NUMBER = r"[-+0-9.einfa]+"


def _said(match: re.Match[str]) -> because.Reason:
    return because.SlurmSaid(notice=_NOTICES[match["notice"]], slurm_state=match["state"])


def _lost(match: re.Match[str]) -> because.Reason:
    return because.NodesLost(nodes=tuple(match["nodes"].split(", ")), error=match["error"] or "")


def _loss(match: re.Match[str]) -> because.Reason:
    rule = DISCONTINUITY if match["resumed"] else SPIKE
    return because.LossWrong(
        rule=rule, step=int(match["step"]), loss=float(match["loss"]), baseline=float(match["usual"])
    )


_SENTENCES: tuple[tuple[re.Pattern[str], Callable[[re.Match[str]], because.Reason]], ...] = (
    (re.compile(rf"(?P<notice>{'|'.join(_NOTICES)}) \(Slurm says (?P<state>[^)]*)\)"), _said),
    (
        re.compile(r"cancelled meanwhile \((?P<state>[^)]*)\)"),
        lambda match: because.SlurmSaid(notice=Notice.CANCELLED, slurm_state=match["state"]),
    ),
    (
        re.compile(r"requeued by Slurm or an admin"),
        lambda _: because.SlurmSaid(notice=Notice.REQUEUED, slurm_state=""),
    ),
    (
        re.compile(r"Slurm could not be asked \((?P<error>.*)\)"),
        lambda match: because.SlurmUnreachable(error=match["error"]),
    ),
    (re.compile(r"no watcher answers on (?P<nodes>[^:]+): taken for lost(?: \((?P<error>.*)\))?"), _lost),
    (re.compile(r"the command ended with 0 \(.*"), lambda _: because.CommandEnded()),
    (
        re.compile(r"the loss is no finite number since step (?P<step>\d{1,18})"),
        lambda match: because.LossWrong(rule=NOT_FINITE, step=int(match["step"])),
    ),
    (
        re.compile(
            rf"the loss is (?P<loss>{_NUMBER})(?P<resumed> after the resume)?, and was (?P<usual>{_NUMBER})"
            r"(?: before it)?, since step (?P<step>\d{1,18})"
        ),
        _loss,
    ),
    (re.compile(LOST), lambda _: because.LostRecently()),
)


def typed(text: str) -> because.Why:
    """Return the reasons of a sentence.

    >>> typed("relaunch: preempted (Slurm says RUNNING); step 5 is committed")[1]
    SlurmSaid(notice=<Notice.PREEMPTED: 'preempted'>, slurm_state='RUNNING')
    """
    if text.startswith(RELAUNCH):
        return (because.Relaunch(), *typed(text.removeprefix(RELAUNCH)))
    return tuple(_typed(part) for part in text.split("; ")) if text else ()


def _typed(part: str) -> because.Reason:
    for pattern, make in _SENTENCES:
        if match := pattern.fullmatch(part):
            try:
                return make(match)
            except ValueError:  # a number that is none
                break
    return because.Sentence(text=part)


def record(plain: dict[str, Any]) -> dict[str, Any]:
    """Return a record of the journal, as JSON has it, with typed reasons."""
    found = dict(plain)
    if "reasons" not in found and isinstance(found.get("why"), str):
        found["reasons"] = _plain(found["why"])
    found["effects"] = [_effect(each) for each in _list(found.get("effects"))]
    found["excluded"] = [_with_reasons(each, "why") for each in _list(found.get("excluded"))]
    event = found.get("event")
    if isinstance(event, dict) and "excluded" in event:
        found["event"] = {**event, "excluded": [_with_reasons(each, "why") for each in _list(event["excluded"])]}
    if isinstance(found.get("missed"), dict):
        found["missed"] = {key: _state(key, value) for key, value in found["missed"].items()}
    return found


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _plain(text: str) -> Any:
    return list(msgspec.to_builtins(typed(text)))


def _with_reasons(value: Any, *keys: str) -> Any:
    """Return a record whose words stand at one of these keys, with reasons."""
    if not isinstance(value, dict) or "reasons" in value:
        return value
    words = next((value[key] for key in keys if isinstance(value.get(key), str)), "")
    return {**value, "reasons": _plain(words)}


def _effect(value: Any) -> Any:
    value = _with_reasons(value, "why", "reason", "said")
    if isinstance(value, dict) and isinstance(value.get("found"), dict):
        return {**value, "found": _with_reasons(value["found"], "text")}
    return value


def _state(name: str, value: Any) -> Any:
    """Return a change of the state (`run_store.recorder`) with typed reasons."""
    if name in ("first_failure", "suspect") and isinstance(value, str):
        return _plain(value)
    if name in ("plan", "fallback_plan"):
        return _inside(value, lambda each: {**each, "why": _plain(each["why"])} if _is_text(each.get("why")) else each)
    if name == "excluded":
        return _inside(value, lambda each: _with_reasons(each, "why") if "node" in each else each)
    if name == "found":
        return _inside(value, lambda each: _with_reasons(each, "text") if "text" in each else each)
    return value


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _inside(value: Any, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    if isinstance(value, list):
        return [_inside(each, change) for each in value]
    if isinstance(value, dict):
        return change({key: _inside(each, change) for key, each in value.items()})
    return value
