"""The self-test where it cannot begin."""

from __future__ import annotations

from pathlib import Path

import pytest

from stepkeeper.cli import main
from stepkeeper.core.exits import ExitCode


def test_what_cannot_begin_says_why_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    commands = tmp_path / "commands"
    commands.mkdir()
    monkeypatch.setenv("PATH", str(commands))
    assert main.main(["selftest", "--dir", "nowhere"]) == ExitCode.USAGE
    assert "--dir nowhere: no such directory" in capsys.readouterr().err
    assert main.main(["selftest", "--python", "no-such-python"]) == ExitCode.USAGE
    assert "--python no-such-python: no such program" in capsys.readouterr().err

    blind = commands / "python-without-torch"
    blind.write_text("#!/bin/sh\necho \"ModuleNotFoundError: No module named 'torch'\" >&2; exit 1\n")
    blind.chmod(0o755)
    assert main.main(["selftest", "--python", str(blind)]) == ExitCode.USAGE
    assert "cannot train: ModuleNotFoundError: No module named 'torch'" in capsys.readouterr().err

    blind.write_text("#!/bin/sh\nexit 0\n")
    assert main.main(["selftest", "--python", str(blind)]) == ExitCode.NO_SLURM
    assert "is Slurm installed here?" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["commands"]
