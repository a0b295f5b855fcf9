"""The doctor says of a command which framework it starts, whether a notice is answered, and how it resumes."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from stepkeeper.cli import main
from tests.doctor.alone import alone  # noqa: F401 - a fixture for all tests here

TRAINER = "from transformers import HfArgumentParser, Trainer, TrainingArguments\n"
PARSED = f"{TRAINER}[a] = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()\n"
PARSED += "Trainer(args=a).train(resume_from_checkpoint=a.resume_from_checkpoint)\n"
MEGATRON = "from megatron.training import pretrain\n"
FRAMEWORK, NOTICE, RESUME, WORLD = "framework", "save on notice", "resume argument", "ranks of a resume"


def said(capsys: pytest.CaptureFixture[str], text: str, command: str) -> dict[str, tuple[str, str, str]]:
    Path("train.py").write_text(text)
    capsys.readouterr()
    main.main(["doctor", "--json", "--command", *shlex.split(command)])
    found = json.loads(capsys.readouterr().out)["findings"]
    wanted = (FRAMEWORK, NOTICE, RESUME, WORLD)
    return {
        each["subject"]: (each["level"], f"{each['found']}; {each['means']}", each.get("remedy", ""))
        for each in found
        if each["subject"] in wanted
    }


def test_a_trainer_whose_command_shows_all(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    found = said(capsys, PARSED, "torchrun train.py --output_dir out")

    assert {name: level for name, (level, _, _) in found.items()} == {
        FRAMEWORK: "ok",
        NOTICE: "warning",
        RESUME: "ok",
        WORLD: "ok",
    }
    assert "Hugging Face Trainer" in found[FRAMEWORK][1]
    assert f"{Path.cwd()}/out (--output_dir of the command)" in found[FRAMEWORK][1]
    assert "--attach auto" in found[NOTICE][2]
    assert "at the end of the command" in found[RESUME][1]
    monkeypatch.setenv("STEPKEEPER_ATTACH", "auto")
    assert said(capsys, PARSED, "torchrun train.py --output_dir out")[NOTICE][0] == "ok"


def test_what_is_not_known_is_a_warning_with_a_remedy(capsys: pytest.CaptureFixture[str]) -> None:
    found = said(capsys, f"{TRAINER}TrainingArguments(output_dir=f'{{x}}')\n", "python train.py")
    assert found[FRAMEWORK][0::2] == ("warning", "set --checkpoint-dir")
    assert (found[RESUME][0], "{resume}" in found[RESUME][2]) == ("warning", True)
    assert "in place of {resume}" in said(capsys, TRAINER, "python train.py {resume}")[RESUME][1]

    found = said(capsys, "import torch\n", "python train.py")
    assert found.keys() == {FRAMEWORK}
    assert found[FRAMEWORK][0] == "warning"
    assert "--framework" in found[FRAMEWORK][2]


def test_megatron_saves_by_an_option_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    found = said(capsys, MEGATRON, "python train.py --save /ck")
    assert (found[NOTICE][0], "--exit-signal-handler" in found[NOTICE][2]) == ("warning", True)
    assert said(capsys, MEGATRON, "python train.py --save /ck --exit-signal-handler")[NOTICE][0] == "ok"


def test_zero_needs_as_many_ranks(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    level, words, remedy = said(capsys, "import deepspeed\n", "deepspeed train.py --save_dir s")[WORLD]
    assert (level, "as many ranks as saved it" in words, "--attach auto" in remedy) == ("note", True, True)
    monkeypatch.setenv("STEPKEEPER_ATTACH", "auto")
    level, words, remedy = said(capsys, "import deepspeed\n", "deepspeed train.py --save_dir s")[WORLD]
    assert (level, "any number of ranks" in words, remedy) == ("ok", True, "")


def test_a_place_for_the_argument_is_none_where_the_framework_has_no_argument(
    capsys: pytest.CaptureFixture[str],
) -> None:
    level, _, remedy = said(capsys, "import deepspeed\n", "deepspeed train.py {resume}")[RESUME]
    assert (level, "no resume argument" in remedy) == ("warning", True)


def test_our_own_library_needs_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    found = said(capsys, "from stepkeeper_trainer import CheckpointManager\n", "python train.py")
    assert {name: level for name, (level, _, _) in found.items()} == {FRAMEWORK: "ok"}
