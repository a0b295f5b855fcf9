"""Which checkpoint is handed to a script whose own call names none."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from stepkeeper_trainer.integrations import chosen, hook


@pytest.fixture(autouse=True)
def unused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chosen, "_used", set())


def test_a_checkpoint_is_of_its_framework_and_is_used_once() -> None:
    environ = {hook.CHECKPOINT_VARIABLE: "huggingface:/out/checkpoint-4"}

    assert chosen.checkpoint("lightning", environ) == ""
    assert chosen.checkpoint("huggingface", environ) == "/out/checkpoint-4"
    assert chosen.checkpoint("huggingface", environ) == "/out/checkpoint-4"
    assert chosen.use("huggingface", "/out/checkpoint-4") == "/out/checkpoint-4"
    assert chosen.checkpoint("huggingface", environ) == "", "the next training of the process is a new one"


def test_nothing_is_handed_to_what_a_rank_starts_or_without_a_choice() -> None:
    environ = {hook.CHECKPOINT_VARIABLE: "huggingface:/out/checkpoint-4", hook.ATTACHED_VARIABLE: "1"}

    assert chosen.checkpoint("huggingface", environ) == ""
    assert chosen.checkpoint("huggingface", {}) == ""


def test_a_checkpoint_is_in_its_directory_by_any_name_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "out").mkdir()
    os.symlink(tmp_path / "out", tmp_path / "link")
    monkeypatch.chdir(tmp_path)
    path = str(tmp_path / "out" / "checkpoint-4")

    assert chosen.is_in(path, "out")
    assert chosen.is_in(path, tmp_path / "link")
    assert not chosen.is_in(path, tmp_path)
    assert not chosen.is_in("", "")
    assert not chosen.is_in(path, None)


def test_an_error_of_ours_leaves_the_call_to_the_script() -> None:
    assert chosen.guarded(lambda: "found", None) == "found"
    assert chosen.guarded(lambda: 1 // 0, "as the script says") == "as the script says"
