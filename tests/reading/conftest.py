from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from stepkeeper.cli.main import main
from stepkeeper.run_store.paths import RunDirectory
from tests.reading import build


class Said(NamedTuple):
    code: int
    out: str
    err: str


Command = Callable[..., Said]


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Command:
    """Run a command below an empty working directory, without a run in the environment or noted in the home."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "no-home"))
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    for name, value in (("COLUMNS", "80"), ("LINES", "24")):
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("STEPKEEPER_RUN_DIR", raising=False)

    def execute(*argv: object) -> Said:
        capsys.readouterr()
        try:
            code = main([str(word) for word in argv])
        except SystemExit as ended:
            code = int(ended.code or 0)
        out, err = capsys.readouterr()
        return Said(code, out, err)

    return execute


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return build.make_run(tmp_path / "my-run")
