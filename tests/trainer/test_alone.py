"""Whether a directory is this user's alone: the one question of both programs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from stepkeeper_trainer.formats.alone import Shared, is_replaceable, why_not_alone

STRANGER = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    made = tmp_path / "own"
    made.mkdir()
    made.chmod(0o700)
    return made


def kinds(path: Path) -> tuple[Shared | None, Shared | None]:
    """Return why a directory is not ours alone, and why others may do more than look into it."""
    found = why_not_alone(path), why_not_alone(path, readers=True)
    return tuple(each.kind if each is not None else None for each in found)  # type: ignore[return-value]


def test_a_directory_that_nobody_else_may_enter_is_ours_alone(directory: Path) -> None:
    assert kinds(directory) == (None, None)


@pytest.mark.parametrize(
    ("mode", "alone", "read"),
    [
        (0o755, Shared.EVERYBODY, None),
        (0o701, Shared.EVERYBODY, None),
        (0o702, Shared.EVERYBODY, Shared.EVERYBODY),
        (0o1777, Shared.EVERYBODY, Shared.EVERYBODY),
    ],
)
def test_what_everybody_may_do_counts(directory: Path, mode: int, alone: Shared, read: Shared | None) -> None:
    directory.chmod(mode)
    assert kinds(directory) == (alone, read)


@needs_root
@pytest.mark.parametrize(
    ("gid", "mode", "alone", "read"),
    [
        (0, 0o770, None, None),  # root's own group
        (STRANGER, 0o750, Shared.GROUP, None),
        (STRANGER, 0o720, Shared.GROUP, Shared.GROUP),
    ],
)
def test_what_a_group_may_do_counts_unless_it_is_ours_alone(
    directory: Path, gid: int, mode: int, alone: Shared | None, read: Shared | None
) -> None:
    os.chown(directory, 0, gid)
    directory.chmod(mode)
    assert kinds(directory) == (alone, read)


@needs_root
def test_a_directory_of_another_user_is_not_ours(directory: Path) -> None:
    os.chown(directory, STRANGER, STRANGER)
    found = why_not_alone(directory, readers=True)
    assert found is not None
    assert (found.kind, found.text) == (Shared.OWNER, f"belongs to user id {STRANGER}, who could put anything there")


@pytest.mark.parametrize("what", ["link", "file"])
def test_what_is_no_directory_is_refused_and_a_link_is_not_followed(directory: Path, what: str) -> None:
    path = directory / what
    if what == "link":
        path.symlink_to(directory)
    else:
        path.touch()
    found = why_not_alone(path)
    assert found is not None
    assert found.kind is Shared.NO_DIRECTORY
    assert ("symbolic link" in found.text) == (what == "link")


@pytest.mark.parametrize(
    ("mode", "by_anybody", "beside_a_project"),
    [
        (0o755, False, False),
        (0o1777, False, False),
        (0o775, True, False),
        (0o777, True, True),
    ],
)
def test_what_lies_where_others_write_can_be_replaced(
    directory: Path, mode: int, *, by_anybody: bool, beside_a_project: bool
) -> None:
    directory.chmod(mode)
    assert is_replaceable(directory) == by_anybody
    assert is_replaceable(directory, of_project=True) == beside_a_project


@needs_root
def test_an_owner_can_replace_what_is_there_unless_he_is_the_projects(directory: Path) -> None:
    os.chown(directory, STRANGER, STRANGER)
    assert is_replaceable(directory)
    assert not is_replaceable(directory, of_project=True)
