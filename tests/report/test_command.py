from __future__ import annotations

import json
import shutil
from pathlib import Path

import msgspec
import pytest

from stepkeeper.run_analytics import reading
from stepkeeper.run_store import submission
from stepkeeper.run_store.paths import RunDirectory
from tests.reading.conftest import Command, command, run
from tests.run_analytics.test_timeline import RECORDED

__all__ = ["command", "run"]  # fixtures of the reading commands


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    directory = tmp_path / "recorded"
    (directory / "checkpoints").mkdir(parents=True)
    for name in ("journal.jsonl", "metrics.csv"):
        shutil.copyfile(RECORDED / name, directory / name)
    shutil.copyfile(RECORDED / "lineage.jsonl", directory / "checkpoints" / "lineage.jsonl")
    return directory


def test_a_page_is_written_where_it_is_asked_for(command: Command, recorded: Path, tmp_path: Path) -> None:
    said = command("report", recorded, "-o", tmp_path / "out.html")

    assert said.code == 0, said.err
    assert "46.1% of the time became progress" in said.out
    html = (tmp_path / "out.html").read_text()
    assert html.startswith("<!doctype html>")
    assert "rank 1 on n2 ended with signal 9" in html
    assert "gone" in html  # the step directories are not there any more


def test_json_has_the_same_figures(command: Command, recorded: Path) -> None:
    document = json.loads(command("report", recorded, "--json").out)

    assert document["standing"] == "finished"
    assert document["ettr"] == pytest.approx(0.461, abs=0.001)
    assert sum(document["wall_s"].values()) == pytest.approx(document["wall_total_s"], abs=1e-6)
    assert [launch["ending"] for launch in document["launches"]] == ["failure", "preempted", "finished"]
    assert [each["step"] for each in document["checkpoints"]] == [15, 30, 45, 53, 60, 75, 90, 105, 120]


def test_a_run_that_has_not_begun_is_said(command: Command, run: RunDirectory, tmp_path: Path) -> None:
    said = command("report", run.path, "-o", tmp_path / "out.html")

    assert said.code == 40
    assert "no supervisor has worked on this run yet" in said.err
    assert not (tmp_path / "out.html").exists()


def test_what_ran_is_read_from_the_records_of_the_attempts(command: Command, recorded: Path, tmp_path: Path) -> None:
    """Attempts that were started alike stand in one row; one with other code in the next; secrets in none."""
    words = ("python", "train.py", "--hub-token", "hf_abcdefghijklmnop")
    for attempt, commit in ((0, "a" * 40), (1, "a" * 40), (2, "b" * 40)):
        ran = msgspec.structs.replace(
            submission.look_at_code(words, tmp_path), commit=commit, directory="/work", unknown=""
        )
        (recorded / "attempts" / f"attempt-{attempt:03d}").mkdir(parents=True)
        submission.write_code(recorded, attempt, ran)

    found = reading.read(RunDirectory(recorded), (0, 1, 2))

    assert [(each.first, each.last, each.commit[0]) for each in found] == [(0, 1, "a"), (2, 2, "b")]
    assert found[0].command_line == "python train.py --hub-token '***'"
    said = command("report", recorded, "-o", "-").out
    assert "commit aaaaaaaaaaaa, in /work" in said
    assert "abcdefghijklmnop" not in said
    document = json.loads(command("report", recorded, "--json").out)
    assert document["learning_rate"] > 0
    assert document["started"][0]["command"][:2] == ["python", "train.py"]
