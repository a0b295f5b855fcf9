"""A script that ends on the argument that a resume appends is told what to do about it, not only that it is wrong."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from stepkeeper.core.causes import Cause
from tests.diagnosis.corpus import verdict

ARGPARSE = "import argparse\np = argparse.ArgumentParser()\np.add_argument('--lr')\np.parse_args()\n"


def test_argparse_itself_is_understood(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(ARGPARSE)
    words = [sys.executable, script, "--lr", "1", "--resume-from", "/run/checkpoints/step_00000100"]
    said = subprocess.run(words, capture_output=True, text=True, timeout=90, check=False)

    judged = verdict(said.stderr)

    assert said.returncode == 2
    assert (judged.cause, judged.rule) == (Cause.CONFIGURATION, "resume-argument-unknown")


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("Error: No such option: --resume-from Did you mean --resume?", "resume-argument-unknown"),
        ("Error: No such option '--resume-from'.", "resume-argument-unknown"),
        ("train.py: error: unrecognized arguments: --lrr 1", "wrong-arguments"),
        ("train.py: error: unrecognized arguments: --resume-from-checkpoint x", "wrong-arguments"),
    ],
)
def test_other_parsers_and_other_arguments(text: str, rule: str) -> None:
    assert verdict(text).rule == rule
