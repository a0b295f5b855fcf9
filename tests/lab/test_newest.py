"""The newest Slurm where it cannot be built: told loudly, and nothing is left behind."""

import os
from pathlib import Path

import pytest

from tests.lab import newest, newest_or_skip

NOBODY_THERE = "http://127.0.0.1:9/debian"


@pytest.fixture
def elsewhere(tmp_path, monkeypatch) -> Path:
    """A machine on which nothing was built, without a network."""
    monkeypatch.setattr(newest, "HOME", tmp_path / "newest")
    monkeypatch.setenv(newest.MIRROR_VARIABLE, NOBODY_THERE)
    return tmp_path / "newest"


@pytest.mark.newest  # it installs debootstrap
@pytest.mark.skipif(os.geteuid() != 0, reason="not root")
def test_without_a_network_it_is_skipped_loudly(elsewhere: Path, capfd) -> None:
    assert newest_or_skip.main(["false"]) == 0

    said = capfd.readouterr().err
    assert "SKIPPED: NOTHING WAS TESTED ON THE NEWEST SLURM" in said
    assert "127.0.0.1" in said
    assert newest.found() is None
    assert sorted(path.name for path in elsewhere.iterdir()) == ["build.log", "lock"]
    assert str(elsewhere) not in Path("/proc/mounts").read_text()


def test_a_directory_that_others_may_write_is_not_used(elsewhere: Path) -> None:
    elsewhere.mkdir()
    elsewhere.chmod(0o777)
    if os.geteuid() != 0:
        pytest.skip("not root")

    with pytest.raises(newest.LabError, match="not ours alone"):
        newest.newest()
