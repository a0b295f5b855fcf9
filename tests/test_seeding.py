"""Examples are drawn by the commit, by each worker alike, and again by the number that the session says."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import seeding

ROOT = Path(__file__).parents[1]
LIMIT_S = 120.0
CONFTEST = """
from tests.seeding import header as pytest_report_header, seed_examples
import pytest
@pytest.hookimpl(tryfirst=True)
def pytest_configure(config):
    seed_examples(config)
"""
DRAWS = """
import os, pathlib
from hypothesis import given, settings, strategies as st
from tests import conftest
drawn = []
@settings(max_examples=20)
@given(st.integers(0, 1_000_000))
def test_draws(number): drawn.append(number)
def test_writes():
    pathlib.Path(__file__).with_suffix(f".{os.environ['LOOK']}").write_text(repr(drawn))
"""


def git(directory: Path, *words: str) -> None:
    who = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", f"safe.directory={directory}"]
    subprocess.run(["git", *who, "-C", str(directory), *words], check=True, capture_output=True, timeout=LIMIT_S)


def session(directory: Path, look: str, *options: str, **variables: str) -> str:
    """Play a session there; return its seed."""
    environment = {name: value for name, value in os.environ.items() if name != seeding.VARIABLE}
    environment |= {
        "PYTHONPATH": str(ROOT),
        "LOOK": look,
        "CI": "true",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        **variables,
    }
    plugins = ["-p", "xdist.plugin", "-p", "_hypothesis_pytestplugin", "-p", "no:cacheprovider"]
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", *plugins, "--rootdir", str(directory), *options, str(directory)],
        env=environment, cwd=directory, capture_output=True, text=True, check=False, timeout=LIMIT_S,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr
    said = re.search(r"^hypothesis seed: (\d+) \(.+\); again: TEST_SEED=(\d+)$", ended.stdout, re.MULTILINE)
    assert said is not None, ended.stdout
    assert said[1] == said[2]
    return said[1]


def test_each_commit_draws_other_examples_and_its_number_draws_them_again(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_drawn.py").write_text(DRAWS)
    git(tmp_path, "init", "-q")
    git(tmp_path, "commit", "-q", "--allow-empty", "-m", "one")

    seed = session(tmp_path, "first", "-n", "1", "--dist", "loadscope")
    git(tmp_path, "commit", "-q", "--allow-empty", "-m", "two")
    other = session(tmp_path, "other")
    again = session(tmp_path, "again", **{seeding.VARIABLE: seed})

    assert seed == again
    assert seed != other
    first, second, third = ((tmp_path / f"test_drawn.{look}").read_text() for look in ("first", "other", "again"))
    assert first == third
    assert first != second


def test_a_seed_that_is_no_number_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(seeding.VARIABLE, "many")

    with pytest.raises(pytest.UsageError, match="TEST_SEED=many: give a whole number"):
        seeding.seed_of(tmp_path)


def test_without_a_commit_the_examples_are_always_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(seeding.VARIABLE, raising=False)

    assert seeding.seed_of(tmp_path) == (0, "no commit is known")
