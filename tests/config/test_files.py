"""What a configuration file may say, who may have written it, and what an error names."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from stepkeeper.config import files
from stepkeeper.config.files import Role
from stepkeeper.config.settings import SETTINGS
from stepkeeper.errors import StepkeeperError
from tests.config.conftest import Gather

is_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to somebody else")


def refusal(text: str, role: Role = Role.USER) -> str:
    with pytest.raises(StepkeeperError) as refused:
        files.parse(text.encode(), Path("/etc/x.toml"), role)
    return str(refused.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("spares = 1\nspare = 1\n", ("/etc/x.toml, line 2", "`spare`", "did you mean `spares`")),
        ("# one\n\nfailures_max = 3\n", ("line 3", "did you mean `policy.failures_max`")),
        ("[policy]\nfailures_max = 0\n", ("line 2", "policy.failures_max = 0", "from 1 to", "(launches)")),
        ("[policy]\nx = 1\n\nleave_within_s = '9'", ("line 2", "`policy.x`")),
        ("[ 'policy' ]\n leave_within_s= '9' # s", ("line 2", "a number from 0.1 to", "(s)")),
        ("policy.leave_within_s = nan", ("line 1", "policy.leave_within_s = nan")),
        ("policy = 3", ("line 1", "policy is a table", "[policy]")),
        ("free_gib_min = 1\n[run]\nfree_gib_min = 2\n", ("line 2", "`run` is not known")),
        ("spares = \n", ("/etc/x.toml: not TOML", "line 1")),
        ("spares = 1\nspares = 2\n", ("not TOML", "line 2")),
        ('run_dir = "a\\u001bb"', ("line 1", "run_dir")),
        ("tasks_per_node = 0", ("tasks_per_node = 0", "ranks a node")),
        ("spares = " + "9" * 5000, ("not TOML", "4300")),
        ("spares = 0x" + "f" * 5000, ("line 1", "spares = too large a number")),
        ("free_gib_min = 0x" + "f" * 5000, ("line 1", "free_gib_min = too large a number")),
        ("x" * 5000 + " = 1", ("line 1", "is not known")),
        ("locked = ['spares']", ("line 1", "only the administrator")),
        ("[locked]\nspares = 1", ("line 1", "only the administrator")),
    ],
)
def test_what_is_wrong_is_named_with_its_place(text: str, words: tuple[str, ...]) -> None:
    said = refusal(text)

    for word in words:
        assert word in said
    assert "\x1b" not in said
    assert len(said) < 500


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("locked = 3", ("line 1", "a list of keys, or a table")),
        ("locked = [3]", ("line 1", "a list of keys")),
        ("locked = ['spare']", ("line 1", "did you mean `spares`")),
        ("[locked]\nspare = 1", ("line 2", "did you mean `spares`")),
        ("[locked]\nspares = -1", ("line 2", "spares = -1")),
        ("spares = 1\n[locked]\nspares = 1", ("line 3", "stands twice")),
    ],
)
def test_a_wrong_lock_is_named_with_its_place(text: str, words: tuple[str, ...]) -> None:
    said = refusal(text, Role.SITE)

    for word in words:
        assert word in said


def test_a_run_directorys_own_file_cannot_say_where_the_run_directory_is() -> None:
    assert "set it elsewhere" in refusal("run_dir = 'x'", Role.RUN)


@settings(max_examples=200, phases=(Phase.explicit, Phase.generate), deadline=None)
@given(
    data=st.one_of(
        st.binary(max_size=200),
        st.lists(
            st.sampled_from(
                [*SETTINGS, "policy", "locked", "[", "]", "=", " ", "\n", "1", "'a'", "true", "{", "}", ","]
            )
        ).map(lambda words: "".join(words).encode()),
    ),
    role=st.sampled_from(Role),
)
def test_whatever_a_file_holds_it_is_understood_or_refused(data: bytes, role: Role) -> None:
    try:
        found = files.parse(data, Path("/x"), role)
    except StepkeeperError as refused:
        assert str(refused).startswith("/x")  # noqa: PT017 - either end is right
    else:
        assert set(found.entries) | set(found.locked) <= set(SETTINGS)


def test_a_file_that_is_not_there_sets_nothing(tmp_path: Path) -> None:
    assert files.read(tmp_path / "no" / "config.toml", Role.USER).entries == {}


def test_a_file_that_everybody_may_write_is_refused(user_file: Path, gather: Gather) -> None:
    user_file.write_text("spares = 1")
    user_file.chmod(0o666)

    with pytest.raises(StepkeeperError, match=r"config.toml: everybody may write it; chmod"):
        gather()


def test_the_group_may_write_a_users_file_and_not_the_sites(user_file: Path, site_file: Path, gather: Gather) -> None:
    """With umask 002 each user has a group of their own; a lock that a group can change is none."""
    user_file.write_text("spares = 1")
    user_file.chmod(0o664)
    assert gather().resolve().settings.spares == 1
    site_file.write_text("spares = 1")
    site_file.chmod(0o664)

    with pytest.raises(StepkeeperError, match=r"its group may write it"):
        gather()


@is_root
def test_a_file_of_somebody_else_is_refused(run_directory: Path, gather: Gather) -> None:
    path = run_directory / "config.toml"
    path.write_text("spares = 1")
    os.chown(path, 65534, -1)

    with pytest.raises(StepkeeperError, match=r"belongs to user id 65534"):
        gather().resolve(run_directory)


def test_a_users_file_may_be_a_link_and_a_runs_may_not(
    user_file: Path, run_directory: Path, tmp_path: Path, gather: Gather
) -> None:
    target = tmp_path / "dotfiles.toml"
    target.write_text("spares = 1")
    user_file.symlink_to(target)
    assert gather().resolve(run_directory).settings.spares == 1
    (run_directory / "config.toml").symlink_to(target)

    with pytest.raises(StepkeeperError, match=r"run/config.toml: cannot be read"):
        gather().resolve(run_directory)


@is_root
def test_the_target_of_a_link_is_what_must_be_trusted(user_file: Path, tmp_path: Path, gather: Gather) -> None:
    target = tmp_path / "planted.toml"
    target.write_text("spares = 1")
    os.chown(target, 65534, -1)
    user_file.symlink_to(target)

    with pytest.raises(StepkeeperError, match=r"belongs to user id 65534"):
        gather()


def test_a_pipe_in_the_place_of_a_file_does_not_hang(user_file: Path, gather: Gather) -> None:
    os.mkfifo(user_file)

    with pytest.raises(StepkeeperError, match=r"cannot be read: not a plain file"):
        gather()


def test_a_huge_file_is_refused(user_file: Path, gather: Gather) -> None:
    user_file.write_text("# " + "x" * 2**20)

    with pytest.raises(StepkeeperError, match=r"more than \d+ bytes"):
        gather()


def test_bytes_that_are_no_text_are_refused(user_file: Path, gather: Gather) -> None:
    user_file.write_bytes(b"run_dir = '\xff'")

    with pytest.raises(StepkeeperError, match=r"not TOML"):
        gather()


def test_a_deeply_nested_file_is_refused(user_file: Path, gather: Gather) -> None:
    user_file.write_text("spares = " + "[" * 100_000)

    with pytest.raises(StepkeeperError, match=r"not TOML"):
        gather()


def test_xdg_config_home_counts_where_it_is_absolute() -> None:
    home = {"HOME": "/home/ada"}

    assert files.user_path({**home, "XDG_CONFIG_HOME": "/x"}) == Path("/x/stepkeeper/config.toml")
    for relative in ("", "x"):
        found = files.user_path({**home, "XDG_CONFIG_HOME": relative})
        assert found == Path("/home/ada/.config/stepkeeper/config.toml")
