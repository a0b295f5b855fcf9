"""How a script's own loop saves is kept for the launches that follow, and taken for its own checkpoints alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from stepkeeper_trainer.formats import records
from stepkeeper_trainer.formats.records import OwnSaves
from stepkeeper_trainer.integrations import remembered

STEP_10 = "step_10"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    directory = tmp_path / "run"
    directory.mkdir()
    monkeypatch.setenv("STEPKEEPER_RUN_DIR", str(directory))
    return directory


def saves(directory: Path) -> OwnSaves:
    return OwnSaves(framework="accelerate", directory=str(directory), prefix="step_", options={"safe": True})


def test_it_is_known_of_a_checkpoint_beside_those_that_were_saved(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (tmp_path / "link").symlink_to(out)

    remembered.keep(saves(out))

    assert remembered.of("accelerate", str(out / STEP_10)) == saves(out)
    assert remembered.of("accelerate", str(tmp_path / "link" / STEP_10)) == saves(out)
    assert remembered.of("accelerate", str(tmp_path / "pretrained" / STEP_10)) is None, "another directory's"
    assert remembered.of("deepspeed", str(out / STEP_10)) is None, "another framework's"
    remembered.forget()
    remembered.forget()
    assert remembered.of("accelerate", str(out / STEP_10)) is None
    assert list(run.iterdir()) == []


def test_what_cannot_be_read_is_as_if_it_were_not_known(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    (run / records.OWN_SAVES_NAME).write_text('{"format": 99}')

    assert remembered.of("accelerate", str(tmp_path / STEP_10)) is None

    assert "saves_not_remembered" in caplog.text + capsys.readouterr().err
    (run / records.OWN_SAVES_NAME).unlink()
    (run / records.OWN_SAVES_NAME).mkdir()
    remembered.keep(saves(tmp_path))
    assert (run / records.OWN_SAVES_NAME).is_dir(), "nothing of it ends the training"


def test_without_a_run_directory_nothing_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("STEPKEEPER_RUN_DIR", raising=False)
    remembered.keep(saves(tmp_path))
    remembered.forget()
    assert remembered.of("accelerate", str(tmp_path / STEP_10)) is None
    assert list(tmp_path.iterdir()) == []
