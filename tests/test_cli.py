"""The command as a new user meets it."""

from __future__ import annotations

import pytest

from stepkeeper.cli import main
from stepkeeper.core.exits import ExitCode


def test_the_command_alone_shows_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main([]) == ExitCode.USAGE
    said = capsys.readouterr().err
    assert "usage: stepkeeper" in said
    assert "what works on this cluster and what does not" in " ".join(said.split())


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("sumbit -- x", "no command `sumbit`; did you mean submit?; see `stepkeeper --help`"),
        ("walk", "no command `walk`; see `stepkeeper --help`"),
        ("submit --spare 1 -- x", "unknown option --spare; did you mean --spares?; see `stepkeeper submit --help`"),
        ("status --folow", "unknown option --folow; did you mean --follow?; see `stepkeeper status --help`"),
        ("status a b", "unknown argument b; see `stepkeeper status --help`"),
        (
            "checkpoints ls --jsn x",
            "did you mean --json?; see `stepkeeper checkpoints ls --help`",
        ),
        ("--versoin", "see `stepkeeper --help`"),
    ],
)
def test_a_mistyped_word_is_answered_with_the_nearest_one(
    capsys: pytest.CaptureFixture[str], line: str, told: str
) -> None:
    with pytest.raises(SystemExit) as refused:
        main.main(line.split())

    assert refused.value.code == ExitCode.USAGE
    said = capsys.readouterr()
    assert told in said.err
    assert len(said.err.splitlines()) == 1
