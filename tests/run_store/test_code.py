"""A resume by other code is seen."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from stepkeeper.run_store import submission
from stepkeeper.run_store.submission import Code


@pytest.fixture(autouse=True)
def git_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever runs this may have set git up in any way, on a machine that is slow."""
    for name in [name for name in os.environ if name.startswith("GIT_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
    monkeypatch.setenv("GIT_CONFIG_NOSYSTEM", "1")
    monkeypatch.setattr(submission, "GIT_WITHIN_S", 90.0)


def git(directory: Path, *words: str) -> None:
    identity = ("-c", "user.name=a", "-c", "user.email=a@b")
    subprocess.run(["git", *identity, *words], cwd=directory, check=True, capture_output=True, timeout=90)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    tree = tmp_path / "work"
    tree.mkdir()
    (tree / "train.py").write_text("print(1)\n")
    (tree / "model.py").write_text("layers = 2\n")
    git(tree, "init", "-q")
    git(tree, "add", ".")
    git(tree, "commit", "-q", "-m", "first")
    return tree


COMMAND = ("python", "train.py", "--lr", "0.1")


def test_the_same_tree_has_no_difference(tree: Path) -> None:
    first = submission.look_at_code(COMMAND, tree)
    assert len(first.commit) == 40
    assert first.changes_xxh3 == ""
    assert first.scripts.keys() == {"train.py"}
    assert submission.code_differences(first, submission.look_at_code(COMMAND, tree)) == []


def test_another_commit_an_edit_and_a_new_module_are_seen(tree: Path) -> None:
    first = submission.look_at_code(COMMAND, tree)
    (tree / "model.py").write_text("layers = 3\n")
    edited = submission.look_at_code(COMMAND, tree)
    assert submission.code_differences(first, edited) == [f"uncommitted changes in {tree} are not the same"]
    (tree / "new.py").write_text("import os\n")
    assert submission.code_differences(edited, submission.look_at_code(COMMAND, tree)) == [
        f"uncommitted changes in {tree} are not the same"
    ]
    git(tree, "add", ".")
    git(tree, "commit", "-q", "-m", "second")
    (said,) = submission.code_differences(first, submission.look_at_code(COMMAND, tree))
    assert said.startswith("commit ")
    (tree / "train.py").write_text("print(2)\n")
    assert "train.py has changed" in submission.code_differences(first, submission.look_at_code(COMMAND, tree))


def test_without_git_the_script_itself_counts(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print(1)\n")
    first = submission.look_at_code(COMMAND, tmp_path)
    assert "git" in first.unknown
    (tmp_path / "train.py").write_text("print(2)\n")
    assert submission.code_differences(first, submission.look_at_code(COMMAND, tmp_path)) == ["train.py has changed"]


def test_where_a_mount_ends_the_search_the_reason_is_gits_and_not_its_advice() -> None:
    """As below a /tmp that is a file system of its own."""
    assert "not a git repository" in submission.look_at_code(COMMAND, Path("/proc/self")).unknown


def test_the_newest_earlier_record_is_what_counts(tmp_path: Path) -> None:
    for attempt in (0, 1, 3):
        (tmp_path / "attempts" / f"attempt-{attempt:03d}").mkdir(parents=True)
    submission.write_code(tmp_path, 0, Code(commit="a" * 40))
    submission.write_code(tmp_path, 1, Code(commit="b" * 40))
    (tmp_path / "attempts" / "attempt-003" / submission.CODE_NAME).write_text("torn")
    assert submission.newest_code_before(tmp_path, 4) == Code(commit="b" * 40)
    assert submission.newest_code_before(tmp_path, 0) is None
