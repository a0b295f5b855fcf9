from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from stepkeeper.config import resolve
from stepkeeper.config.files import Entry
from stepkeeper.config.resolve import Sources

Gather = Callable[..., Sources]


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A user's home directory, with `.config/stepkeeper`."""
    (tmp_path / "home" / ".config" / "stepkeeper").mkdir(parents=True)
    return tmp_path / "home"


@pytest.fixture
def user_file(home: Path) -> Path:
    return home / ".config" / "stepkeeper" / "config.toml"


@pytest.fixture
def site_file(tmp_path: Path) -> Path:
    """The administrator's file: in a place of the test's own."""
    (tmp_path / "etc").mkdir()
    return tmp_path / "etc" / "config.toml"


@pytest.fixture
def run_directory(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir(mode=0o700)
    return tmp_path / "run"


@pytest.fixture
def gather(home: Path, site_file: Path) -> Gather:
    def do(flags: Mapping[str, object] | None = None, **environment: str) -> Sources:
        entries = {
            key: Entry(value, "--" + key.rpartition(".")[2].replace("_", "-"))  # type: ignore[arg-type]
            for key, value in (flags or {}).items()
        }
        return resolve.gather(entries, {"HOME": str(home), **environment}, site=site_file)

    return do
