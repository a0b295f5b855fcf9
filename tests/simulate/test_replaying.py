from __future__ import annotations

import json
from pathlib import Path

import msgspec

from stepkeeper.cli.dev import recorded_policies
from stepkeeper.core import events as on
from stepkeeper.core.policy import Policy
from stepkeeper.core.state import Phase
from stepkeeper.run_store import journal
from stepkeeper.simulate.replay import replay
from tests.reading.conftest import Command, command
from tests.run_analytics.build import Journal

__all__ = ["command"]  # a fixture of the reading commands


def failing(policy: Policy | None = None) -> Journal:
    told = Journal(policy=policy)
    told.begin(0)
    told.launch(5)
    told.steps(1, 20, at=10)
    told.commit(10, at=20)
    told.rank_dies(31, left=1)
    if told.state.phase is Phase.STARTING:
        told.launch(35, resume=10)
        told.steps(11, 20, at=40)
    told.begin(100)
    told.launch(105, resume=10)
    return told


def lines(told: Journal) -> list[journal.Line]:
    return [journal.Line(record, msgspec.json.encode(record)) for record in told.records]


def write(path: Path, told: Journal) -> Path:
    path.mkdir()
    data = b"\n".join(line.data for line in lines(told)) + b"\n"
    (path / "journal.jsonl").write_bytes(data)
    return path


def test_the_same_rules_decide_the_same() -> None:
    told = failing()

    found = replay(lines(told), {}, words=True)

    assert found.differences == []
    assert (found.attempts, found.records) == (2, len(told.records))


def test_records_whose_nodes_stand_in_one_before_are_decided_again_too() -> None:
    told = failing()
    for index, record in enumerate(told.records):
        if not isinstance(record.event, on.AttemptStarted):
            told.records[index] = msgspec.structs.replace(record, nodes=None)

    found = replay(lines(told), {}, words=True)

    assert found.differences == []
    assert found.records == len(told.records)


def test_another_policy_decides_otherwise_and_the_place_is_named() -> None:
    told = failing()

    found = replay(lines(told), {0: Policy(on_exception="stop")})

    (difference,) = found.differences
    assert difference.record.attempt == 0
    assert told.records[difference.line - 1] == difference.record
    assert difference.then["effects"] != difference.now["effects"]


def test_torn_lines_repeats_and_a_missing_beginning_are_counted() -> None:
    told = lines(failing())
    second = next(index for index, line in enumerate(told) if line.record and line.record.attempt == 1)
    damaged = [*told[:3], told[2], journal.Line(None, b"{torn"), *told[3:second], *told[second + 1 :]]

    found = replay(damaged, {}, stop_after=100)

    assert (found.repeated, found.unreadable, found.attempts) == (1, 1, 1)
    assert found.without_start == len(told) - second - 1
    assert found.differences == []


def test_the_command_says_that_nothing_differs(command: Command, tmp_path: Path) -> None:
    run = write(tmp_path / "run", failing())

    said = command("dev", "replay", run)

    assert said.code == 0, said.err
    assert "today's rules decide the same" in said.out
    assert "by the default policy" in said.out


def test_the_command_shows_the_first_difference_and_ends_with_1(command: Command, tmp_path: Path) -> None:
    run = write(tmp_path / "run", failing())

    said = command("dev", "replay", run / "journal.jsonl", "--policy", "on_exception=stop")
    document = json.loads(command("dev", "replay", run, "--policy", "on_exception=stop", "--json").out)

    assert said.code == 1
    assert "then" in said.out
    assert "now" in said.out
    assert len(document["differences"]) == 1
    assert f"line {document['differences'][0]['line']}:" in said.out


def test_each_attempt_goes_by_its_recorded_policy(command: Command, tmp_path: Path) -> None:
    run = write(tmp_path / "run", failing(Policy(on_exception="stop")))
    for attempt in (0, 1):
        place = run / "attempts" / f"attempt-{attempt:03d}"
        place.mkdir(parents=True)
        settings = {
            "policy.on_exception": {"value": "stop"},
            "policy.of_a_newer_version": {"value": 3},
            "spares": {"value": 0},
        }
        (place / "config.json").write_text(json.dumps({"settings": settings}))

    said = command("dev", "replay", run)

    assert said.code == 0, said.out
    assert "the recorded policies of 2 attempts" in said.out
    assert command("dev", "replay", run, "--policy", "on_exception=relaunch, stop").code == 1


def test_what_was_a_setting_in_an_attempt_counts_for_it(tmp_path: Path) -> None:
    """It is a constant now."""
    place = tmp_path / "attempts" / "attempt-000"
    place.mkdir(parents=True)
    settings = {"policy.kill_within_s": {"value": 7.0}, "policy.grow_ask_s": {"value": 60.0}}
    (place / "config.json").write_text(json.dumps({"settings": settings}))

    assert recorded_policies(tmp_path) == {0: Policy(kill_within_s=7.0)}


def test_wrong_policies_and_missing_journals_are_said(command: Command, tmp_path: Path) -> None:
    run = write(tmp_path / "run", failing())

    assert "--policy nonsense=1" in command("dev", "replay", run, "--policy", "nonsense=1").err
    assert command("dev", "replay", run, "--policy", "failures_max=many").code == 2
    assert command("dev", "replay", tmp_path / "nothing").code == 40
