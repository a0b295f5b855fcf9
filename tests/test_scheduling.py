"""Which worker gets which test, and when."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import scheduling

ROOT = Path(__file__).parents[1]
CRASH_LIMIT_S = 120.0

SECONDS = {"a.py::long": 90.0, "a.py::other[x-y]": 20.0, "a.py::short": 5.0, "b.py::long": 60.0, "c.py::long": 30.0}


@pytest.fixture(autouse=True)
def table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduling, "seconds", lambda: SECONDS)


def test_long_tests_come_first_and_each_for_itself_and_modules_stay_together() -> None:
    names = ["a.py::new", "a.py::long", "a.py::short", "b.py::long", "a.py::other[x-y]", "c.py::long", "d.py::new"]

    order = scheduling.in_order([(name, False) for name in names], 1)

    assert order == ["a.py::long", "b.py::long", "c.py::long", "a.py::other[x-y]", "a.py", "d.py"]


def test_a_story_that_is_not_listed_is_taken_for_a_long_one() -> None:
    names = ["a.py::short", "tests/stories/test_new.py::one", "tests/stories/test_new.py::two", "c.py::long"]

    order = scheduling.in_order([(name, False) for name in names], 1)

    assert order == ["tests/stories/test_new.py::one", "tests/stories/test_new.py::two", "c.py::long", "a.py"]


def test_only_one_worker_begins_with_what_is_made_for_all() -> None:
    names = [("a.py::long", True), ("b.py::long", True), ("c.py::long", True), ("d.py::new", False), ("e.py::a", False)]

    order = scheduling.in_order(names, 3)

    assert order == ["a.py::long", "d.py", "e.py", "b.py::long", "c.py::long"]


@pytest.mark.parametrize(
    ("wanted", "text", "left_out"),
    [
        ("campaign or newest", "def test_x(): ...", True),
        ("campaign or newest", "@pytest.mark.newest\ndef test_x(): ...", False),
        ("campaign", "pytestmark = pytest.mark.campaign", False),
        ("not campaign", "def test_x(): ...", False),
        ("campaign and not newest", "def test_x(): ...", False),
        ("", "def test_x(): ...", False),
    ],
)
def test_modules_without_what_is_wanted_are_not_imported(tmp_path, wanted: str, text: str, left_out: bool) -> None:  # noqa: FBT001
    (tmp_path / "test_some.py").write_text(text)
    (tmp_path / "conftest.py").write_text("")

    assert scheduling.has_none_of(tmp_path / "test_some.py", wanted) is left_out
    assert not scheduling.has_none_of(tmp_path / "conftest.py", wanted)
    assert not scheduling.has_none_of(tmp_path, wanted)


def test_what_was_seen_is_written_down_only_where_that_is_asked_for(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduling, "TABLE", tmp_path / "table")
    report = pytest.TestReport("a.py::short", ("a.py", 1, "short"), {}, "passed", None, "call", duration=12.34)

    monkeypatch.delenv(scheduling.VARIABLE, raising=False)
    scheduling.write_down([report])
    assert not scheduling.TABLE.exists()

    monkeypatch.setenv(scheduling.VARIABLE, "1")
    scheduling.write_down([report])
    assert scheduling.TABLE.read_text().splitlines()[-1] == "12.3 a.py::short"


def test_a_long_test_that_the_table_lacks_is_told() -> None:
    took = {"a.py::long": 300.0, "a.py::new": 300.0, "b.py::quick": 3.0, "tests/stories/test_new.py::one": 50.0}
    reports = [
        pytest.TestReport(name, ("a.py", 1, "x"), {}, "passed", None, "call", duration=each)
        for name, each in took.items()
    ]

    assert scheduling.long_and_not_listed(reports) == ["300 a.py::new"]


def test_the_parts_of_the_campaign_take_about_as_long_and_have_every_test_once() -> None:
    names = ["a.py::long", "a.py::short", "a.py::new", "b.py::long", "c.py::long", "d.py::new"]

    found = scheduling.parts(names, 2)

    assert sorted(name for part in found for name in part) == sorted(names)
    assert [sorted(part) for part in found] == [
        ["a.py::long", "a.py::new", "a.py::short"],
        ["b.py::long", "c.py::long", "d.py::new"],
    ]


@pytest.mark.parametrize("wanted", ["0/3", "4/3", "1", "a/b"])
def test_a_part_that_there_is_not_is_refused(wanted: str) -> None:
    class Chosen:
        def getoption(self, *_: object) -> str:
            return wanted

    with pytest.raises(pytest.UsageError, match="give K/N"):
        scheduling.leave_out(Chosen(), [])  # type: ignore[arg-type]


CONFTEST = """
from tests.conftest import pytest_terminal_summary
from tests.scheduling import let_forked_children_go as pytest_configure, pytest_xdist_make_scheduler
"""
CRASHING = """
import os, signal
def test_before(): ...
def test_that_ends_its_worker(): os.kill(os.getpid(), signal.SIGKILL)
def test_after(): ...
def test_long_after(): ...
"""
FORKING = """
import os, signal, time
def test_that_leaves_a_child_of_its_worker():
    if not os.fork():
        time.sleep(600)  # it would hold the worker's pipes
        os._exit(0)
    os.kill(os.getpid(), signal.SIGKILL)
"""
OTHER = "def test_it(): ...\n"


def played(directory: Path, modules: dict[str, str], *, interrupted_at: Path | None = None) -> tuple[int, str]:
    """Play modules in two workers; return the exit code and the output.  As a file appears, the session gets SIGINT."""
    for name, text in modules.items():
        (directory / f"test_{name}.py").write_text(text)
    (directory / "conftest.py").write_text(CONFTEST)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment |= {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    session = subprocess.Popen(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "xdist.plugin",
         "--rootdir", str(directory), "-n", "2", "--dist", "loadscope", str(directory)],
        cwd=directory, env=environment, text=True, stdout=subprocess.PIPE,
        start_new_session=True,
    )  # fmt: skip
    try:
        give_up_at = time.monotonic() + CRASH_LIMIT_S
        while interrupted_at is not None and not interrupted_at.exists() and time.monotonic() < give_up_at:
            time.sleep(0.05)
        if interrupted_at is not None:
            session.send_signal(signal.SIGINT)
        said, _ = session.communicate(timeout=CRASH_LIMIT_S)
    finally:
        with contextlib.suppress(ProcessLookupError):  # of its group nothing may be left
            os.killpg(session.pid, signal.SIGKILL)
        session.wait(CRASH_LIMIT_S)
    return session.returncode, said


def test_a_worker_that_crashes_costs_the_test_that_it_crashed_in_and_no_other(tmp_path) -> None:
    code, said = played(tmp_path, {"crashing": CRASHING, "forking": FORKING, "other": OTHER, "third": OTHER})

    assert code == pytest.ExitCode.TESTS_FAILED, said
    assert "= 2 failed, 5 passed in " in said
    assert "FAILED test_crashing.py::test_that_ends_its_worker - worker 'gw" in said
    assert "FAILED test_forking.py::test_that_leaves_a_child_of_its_worker - worker 'gw" in said


def test_an_interrupted_session_says_what_it_was_playing(tmp_path) -> None:
    there = tmp_path / "there"
    waits = f"import pathlib, time\ndef test_it():\n    pathlib.Path({str(there)!r}).touch()\n    time.sleep(600)\n"

    code, said = played(tmp_path, {"waiting": waits, "other": OTHER}, interrupted_at=there)

    assert code == pytest.ExitCode.INTERRUPTED, said
    assert re.search(r"^INTERRUPTED in gw\d test_waiting\.py::test_it$", said, re.MULTILINE), said
