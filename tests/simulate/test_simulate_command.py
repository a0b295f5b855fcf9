from __future__ import annotations

import json
from pathlib import Path

import pytest

from stepkeeper.simulate import scenario
from tests.reading.conftest import Command, command

__all__ = ["command"]  # a fixture of the reading commands

PREEMPTED = """# A notice with two minutes left.
given training step=900
10 SignalReceived
11 SlurmAnswered preempt=10 end=130
"""


def test_a_scenario_is_played_with_what_comes_of_it(command: Command, tmp_path: Path) -> None:
    file = tmp_path / "notice.txt"
    file.write_text(PREEMPTED)

    said = command("dev", "simulate", file)

    assert said.code == 0, said.err
    assert said.out.startswith("# A notice with two minutes left.\ngiven training step=900\n10 SignalReceived\n> ")
    assert "->" in said.out
    assert "RequestSave stop=yes" in said.out
    assert "preempted" in said.out


def test_what_was_printed_plays_to_the_same_again() -> None:
    played = scenario.play(PREEMPTED)

    assert played != PREEMPTED
    assert scenario.play(played) == played


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("5 NoSuchEvent", "no event NoSuchEvent; there are A"),
        ("5 RankExited colour=red", "RankExited has no colour; it has at, launch, rank"),
        ("5 RankExited code=many", "Expected `int | null`"),
        ("5 RankExited 1", "`1` is not key=value"),
        ("soon RankExited", "could not convert"),
        ("5 SlurmAnswered state=ASLEEP", "one of PENDING"),
        ("5 NodesCleared unfit=b", "write name:what"),
        ("policy failures_max=many", "Expected `int`"),
        ("policy nonsense=1", "unknown field `nonsense`"),
        ("5 RankExited 'open", "No closing quotation"),
    ],
)
def test_a_wrong_line_is_named(line: str, problem: str, command: Command, tmp_path: Path) -> None:
    file = tmp_path / "wrong.txt"
    file.write_text(f"# wrong\n{line}\n")

    said = command("dev", "simulate", file)

    assert said.code == 2
    assert f"line 2: `{line}`" in said.err
    assert problem in said.err


def test_choices_are_compared(command: Command) -> None:
    options = ("--days", "5", "--runs", "2", "--save-every", "10min,1h", "--spares", "0,8", "--seed", "5")
    said = command("dev", "simulate", *options)
    found = json.loads(command("dev", "simulate", *options, "--json").out)

    assert said.code == 0, said.err
    assert len(said.out.split("\n\n")[0].splitlines()) == 5
    assert [(each["interval_s"], each["spares"]) for each in found] == [(600, 0), (600, 8), (3600, 0), (3600, 8)]
    assert found[1]["ettr"] > found[0]["ettr"] > 0.7
    assert found[0]["shares"]["queue"] > found[1]["shares"]["queue"]
    assert found[2]["shares"]["lost"] > found[0]["shares"]["lost"]
    assert "2,048 nodes over 5 days" in said.out


def test_a_policy_that_gives_up_at_once_calls_for_a_person(command: Command) -> None:
    options = ("--days", "10", "--runs", "1", "--spares", "16", "--save-every", "1h", "--json")
    patient = json.loads(command("dev", "simulate", *options, "--policy", "failures_max=10").out)
    hasty = json.loads(command("dev", "simulate", *options, "--policy", "failures_max=1").out)

    assert hasty[0]["persons"] > patient[0]["persons"]
    assert hasty[0]["stopped_for"]


@pytest.mark.parametrize(
    "options",
    [
        ("--failures", "often"),
        ("--save-every", "1s"),
        ("--save-every", "soon"),
        ("--nodes", "0"),
        ("--runs", "0"),
        ("--spares", "-1"),
        ("--policy", "nonsense=1"),
    ],
)
def test_what_makes_no_sense_is_a_usage_error(options: tuple[str, str], command: Command) -> None:
    said = command("dev", "simulate", *options)

    assert said.code == 2
    assert said.err.startswith("stepkeeper: ")


@pytest.mark.parametrize("name", ["fresh_start", "node_fault_with_a_spare", "finished_in_grace", "exit_93"])
def test_the_project_s_own_scenarios_play_to_what_they_promise(name: str) -> None:
    text = (Path(__file__).parents[1] / "core" / "scenarios" / f"{name}.txt").read_text()

    assert scenario.play(text) == text


def test_flags_are_written_as_they_are_shown() -> None:
    state = scenario.given_training()

    assert scenario.parse("5 CheckpointVerified directory=d ok=no", state).ok is False  # type: ignore[union-attr]
    assert scenario.parse("5 CheckpointVerified directory=no ok=yes", state).directory == "no"  # type: ignore[union-attr]
