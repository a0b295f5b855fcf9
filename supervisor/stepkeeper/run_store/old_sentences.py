"""Journals of release 0.1 knew reasons as sentences only: read them as typed ones.  Nothing else knows these sentences.

What nothing depends on stays a sentence (`Sentence`).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import msgspec

from stepkeeper.core import reasons as because
from stepkeeper.core.causes import Notice
from stepkeeper.core.losses import DISCONTINUITY, NOT_FINITE, SPIKE

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
