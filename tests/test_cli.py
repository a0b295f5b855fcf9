"""The command as a new user meets it."""

from __future__ import annotations

import pytest

from stepkeeper import cli
from stepkeeper.core.exits import ExitCode


def test_the_command_alone_shows_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == ExitCode.USAGE
    said = capsys.readouterr().err
    assert "usage: stepkeeper" in said
    assert "what works on this cluster and what does not" in " ".join(said.split())
