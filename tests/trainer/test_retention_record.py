"""A manager records where and by what rules steps are kept, and the commands go by it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stepkeeper.cli.main import main
from stepkeeper_trainer.formats import records
from stepkeeper_trainer.tiers.tier import Tiers
from tests.trainer.test_keeper import Loop

pytestmark = pytest.mark.usefixtures("one_process")


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, object]:
    capsys.readouterr()
    assert main(["checkpoints", *arguments, "--json"]) == 0
    document: dict[str, object] = json.loads(capsys.readouterr().out)
    return document


def test_what_only_the_script_says_is_known_to_the_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    tiers = Tiers(local=str(tmp_path / "disk"), cold=str(tmp_path / "cold"))
    loop = Loop(run, retention="newest 4, best loss 1", tiers=tiers, total_steps=2, every=1)
    loop.manager.resume()
    loop.run(2)
    assert loop.manager.finish() == 0

    found = told(capsys, "tiers", str(run))
    pruned = told(capsys, "prune", str(run), "--dry-run")

    assert isinstance(found["tiers"], list)
    assert [(tier["kind"], tier["newest"]) for tier in found["tiers"]][1:] == [("shared", 2), ("cold", 2)]
    assert found["tiers"][0]["kind"] == "local"
    assert (pruned["rules"], pruned["rules_of"]) == ("newest 4, best loss 1", "of the run's script, launch 0.0")


def test_a_run_directory_that_does_not_take_the_record_harms_no_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "run" / records.KEEPING_NAME).mkdir(parents=True)  # no file can take its place
    loop = Loop(tmp_path / "run")

    with caplog.at_level("WARNING"):
        loop.manager.resume()
    loop.run(1)
    loop.manager.save()

    assert loop.manager.wait_saved(90)
    assert "keeping_unrecorded" in caplog.text
