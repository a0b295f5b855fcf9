"""What CI looks at a second time, and what it does not forgive."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.second_look import named_lately

ROOT = Path(__file__).parents[1]
LIMIT_S = 120.0

STEADY = "def test_one(): ...\n"
BROKEN = "def test_one(): assert False\n"
UNSTEADY = """
import pathlib, pytest
@pytest.mark.parametrize("name", ["a b"])
def test_one(name):
    before = pathlib.Path(__file__).with_suffix(".before")
    if not before.exists():
        before.touch()
        raise AssertionError
"""
LEAVES = """
import pytest
@pytest.fixture
def leak():
    yield
    raise RuntimeError("left behind")
def test_one(leak): ...
"""


INTERRUPTED = """
def test_one(): raise KeyboardInterrupt
"""
NAME = "test_unsteady.py::test_one[a b]"


def sessions(tmp_path: Path, named: str = "", **modules: str) -> tuple[int, str]:
    """Play some modules as `make test` does, then the second look; return how that ended, and what it said."""
    for name, text in modules.items():
        (tmp_path / f"test_{name}.py").write_text(text)
    file = tmp_path / "failed"
    unsteady = tmp_path / "unsteady.txt"
    unsteady.write_text(named)
    options = ["-q", "-p", "no:cacheprovider", "--rootdir", str(tmp_path)]
    first = [
        sys.executable,
        "-m",
        "pytest",
        *options,
        "-p",
        "tests.second_look",
        "--write-failed",
        str(file),
        str(tmp_path),
    ]
    aside: dict[str, Any] = {"timeout": LIMIT_S, "capture_output": True, "text": True, "cwd": tmp_path}
    aside["env"] = {**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    subprocess.run(first, check=False, **aside)
    second = [sys.executable, "-m", "tests.second_look", str(file), str(unsteady), *options]
    ended = subprocess.run(second, check=False, **aside)
    assert not file.exists(), "the list counts for one session"
    return ended.returncode, ended.stderr


def test_what_passes_alone_is_named_and_is_no_failure(tmp_path: Path) -> None:
    code, said = sessions(tmp_path, steady=STEADY, unsteady=UNSTEADY)

    assert code == 0, said
    assert f"UNSTEADY: {NAME} failed beside other tests and passed alone" in said
    assert re.search(rf"add .*: \d{{4}}-\d\d-\d\d [0-9a-f]{{7,}} {re.escape(NAME)}$", said, re.MULTILINE), said


@pytest.mark.parametrize(("since", "code"), [(4, 1), (5, 0)])
def test_what_was_named_lately_is_not_forgiven_again(tmp_path: Path, since: int, code: int) -> None:
    lines = ["# date, commit, test", f"2026-11-20 1234567 {NAME}"]
    lines += [f"2026-11-2{number} 123456{number} test_other.py::test_{number}" for number in range(since)]

    ended, said = sessions(tmp_path, named="\n".join(lines) + "\n", unsteady=UNSTEADY)

    assert ended == code, said
    assert ("it is in the last 5 lines of unsteady.txt" in said) is bool(code)


def test_the_list_of_those_that_were_named_can_be_read() -> None:
    assert all(name.startswith("tests/") and "::" in name for name in named_lately(ROOT / "tests/unsteady.txt"))


def test_what_fails_twice_is_a_defect(tmp_path: Path) -> None:
    code, said = sessions(tmp_path, broken=BROKEN, unsteady=UNSTEADY)

    assert code == 1
    assert "UNSTEADY" not in said


@pytest.mark.parametrize(
    ("modules", "why"),
    [
        ({"steady": STEADY}, "did not end with failed tests alone"),
        ({"unsteady": UNSTEADY, "with_interrupt": INTERRUPTED}, "did not end with failed tests alone"),
        ({"unsteady": UNSTEADY, "leaves": LEAVES}, "did not end with failed tests alone"),
        ({"one": UNSTEADY, "two": UNSTEADY, "three": UNSTEADY}, "3 tests failed, and more than 2 are no chance"),
    ],
)
def test_what_chance_does_not_explain_gets_no_second_look(tmp_path: Path, modules: dict[str, str], why: str) -> None:
    code, said = sessions(tmp_path, **modules)

    assert code == 1
    assert why in said
