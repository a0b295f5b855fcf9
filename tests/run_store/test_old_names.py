"""Journals of earlier releases are read by the names of today."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from stepkeeper import reason_text
from stepkeeper.config import resolve
from stepkeeper.core.baseline import Pace
from stepkeeper.core.effects import Effect
from stepkeeper.core.events import Event
from stepkeeper.core.losses import Losses
from stepkeeper.core.reasons import Fact, Plain
from stepkeeper.core.stragglers import Suspect
from stepkeeper.run_store import journal, old_journals
from stepkeeper.run_store.recorder import HOLDERS
from stepkeeper.watcher import messages as lines

FIXTURES = Path(__file__).parents[1] / "fixtures"
FRAME = {"v": 1, "job_id": 7, "restart_count": 0, "attempt": 0, "launch": 0, "phase": "training"}
EVENTS: dict[str, dict[str, Any]] = {
    "stood_still": {"seconds": 700.0},
    "asked": {"name": "ask-1", "kind": "stop", "by": "ada"},
    "save_gave_up": {"launch": 0, "step": 9, "save_id": "s1", "error": "No space left on device"},
}
EFFECTS: dict[str, dict[str, Any]] = {
    "call_person": {"code": 12, "reason": "failed"},
    "tell_slow_node": {"node": "a", "factor": 2.0, "since": 1.0},
    "tell_slow_launch": {"seconds": 1.5, "usual": 1.0},
    "tell_replay": {"equal": True, "steps": 3},
    "answer_ask": {"name": "ask-1", "said": "saved"},
}


def record(**fields: Any) -> journal.Record:
    line = msgspec.json.encode(FRAME | {"event": {"event": "tick", "at": 1.0}} | fields)
    return msgspec.json.decode(old_journals.translate(line), type=journal.Record)


@pytest.mark.parametrize("run", ["run-0.1", "run-0.1-failures"])
def test_every_record_of_an_earlier_release_is_read(run: str) -> None:
    lines = list(journal.read_lines(FIXTURES / run / "journal.jsonl"))

    assert lines
    assert [line.data for line in lines if line.record is None] == []


def test_every_old_tag_is_read_as_the_one_of_today() -> None:
    assert EVENTS.keys() == old_journals.EVENTS.keys()
    assert EFFECTS.keys() == old_journals.EFFECTS.keys()
    for old, fields in EVENTS.items():
        event: Event = record(event={"event": old, "at": 1.0, **fields}).event
        assert event.__struct_config__.tag == old_journals.EVENTS[old]
    for old, fields in EFFECTS.items():
        effect: Effect = record(effects=[{"effect": old, **fields}]).effects[0]
        assert effect.__struct_config__.tag == old_journals.EFFECTS[old]


def test_reasons_that_were_merged_are_read_with_the_fact_that_they_were() -> None:
    facts: dict[str, Any] = {"nodes": ["a"], "node": "a", "text": "x", "by": "ada", "failures": 3, "stacks": "s"}
    facts |= {"error": "full", "directory": "step_00000007", "problem": "wrong", "step": 7}
    for old, new in old_journals.REASONS.items():
        reason = {"reason": old, **facts} if old != "node_given_back" else {"reason": old}
        read = record(reasons=[reason], effects=[{"effect": "exit", "code": 0, "reasons": [reason]}])
        assert read.reasons == read.effects[0].reasons
        worded = {"effect": "exit", "code": 0, "reason": "in words", "reasons": [reason]}
        assert record(effects=[worded]).effects == read.effects, "its words were taken for a reason"
        (found,) = read.reasons
        facts_now = {"reason": found.__struct_config__.tag, **msgspec.json.decode(msgspec.json.encode(found))}
        assert facts_now | new == facts_now


@pytest.mark.parametrize(
    "reason",
    [
        pytest.param({"reason": "requeue_forbidden"}, id="release 0.1"),
        pytest.param({"reason": "plain", "fact": "requeue_forbidden"}, id="before 0.2"),
    ],
)
def test_the_end_of_a_run_that_was_not_to_be_submitted_again_is_read(reason: dict[str, str]) -> None:
    """The last record of a run with `resubmit=never`, which is no setting any more."""
    read = record(reasons=[reason], effects=[{"effect": "exit", "code": 25, "reasons": [reason]}])

    (found,) = read.reasons
    assert found == Plain(fact=Fact.REQUEUE_FORBIDDEN)
    assert read.effects[0].reasons == read.reasons
    assert "submit it again" in reason_text.text(read.reasons)


def test_old_fields_keep_their_values() -> None:
    window = [{"step": 850, "steps": 2}]
    read = record(
        usual={"start_s": 12.5}, left_out=window, effects=[{"effect": "tell_slow_launch", "seconds": 2.0, "usual": 1.5}]
    )

    assert read.baseline.start_s == 12.5
    assert [msgspec.to_builtins(each) for each in read.skipped_data] == window
    assert read.effects[0].baseline == 1.5


def test_old_fields_of_the_state_are_fields_of_today() -> None:
    missed = record(missed=dict.fromkeys(old_journals.STATE, "x") | {"step": 3}).missed

    assert set(missed) == {*old_journals.STATE.values(), "step"}
    assert set(missed) <= set(HOLDERS)


def test_old_rules_of_a_diagnosis_are_read_as_the_ones_of_today() -> None:
    for old, new in old_journals.RULES.items():
        judged = {"event": "judged", "at": 1.0, "launch": 0, "cause": "cancelled", "rule": old, "confidence": 0.4}
        found = {"reason": "cause_found", "cause": "cancelled", "rule": old, "confidence": 0.4}
        read = record(event=judged, reasons=[found])

        assert read.event.rule == new
        assert read.reasons[0].rule == new


@pytest.mark.parametrize("run", ["run-0.1", "run-0.1-failures"])
def test_old_values_of_settings_are_read_as_the_ones_of_today(run: str) -> None:
    policy = resolve.read_record(FIXTURES / run, 0).policy()

    assert (policy.loss_spike, policy.loss_not_finite) == ("report", "rollback")


def test_a_record_of_today_is_not_touched() -> None:
    line = msgspec.json.encode(FRAME | {"event": {"event": "suspended", "at": 1.0, "seconds": 9.0}, "baseline": {}})

    assert old_journals.translate(line) is line


def test_what_was_renamed_in_the_code_keeps_its_name_in_journals_and_on_the_bus() -> None:
    save = lines.Save(launch=1, request_id=1, stop=True, why="x", library_seen=True)
    assert msgspec.json.decode(lines.encode(save))["heard"] is True
    assert msgspec.json.decode(lines.encode(lines.StopSignalSent(node="a", launch=1, text="x")))["type"] == "told"
    assert (
        msgspec.json.decode(lines.encode(lines.ShardRead(node="a", number=1, index=0, of=1, bytes_read=0)))["type"]
        == "share_read"
    )
    assert {"heard": 3, "told": True}.items() <= msgspec.to_builtins(Losses(count=3, reported=True)).items()
    assert msgspec.to_builtins(Suspect(node="a", since=1.0, reported=True))["told"] is True
    assert msgspec.to_builtins(Pace(steps=2))["heard"] == 2
