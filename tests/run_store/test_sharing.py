"""A group-readable run directory: every file in it, whatever the umask, and nothing outside it."""

import os
import stat
from pathlib import Path

import pytest

from stepkeeper.run_store import paths


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run directory as a umask of 077 leaves it."""
    run = tmp_path / "run"
    step = run / "checkpoints" / "step_00000010"
    logs = run / "logs" / "attempt-000" / "launch-000"
    flight = run / "checkpoints" / ".tmp-step_00000020.abc"
    for directory in (step, logs, flight):
        directory.mkdir(parents=True)
    for file in (run / "journal.jsonl", step / "MANIFEST.json", logs / "n1.log", flight / "part"):
        file.write_text("x")
    for path in (run, *run.rglob("*")):
        path.chmod(0o700 if path.is_dir() else 0o600)
    return run


def test_the_group_may_read_every_file_and_change_none(run: Path) -> None:
    paths.share_with_group(run)

    shared = [path for path in (run, *run.rglob("*")) if ".tmp-" not in str(path)]
    assert len(shared) == 9
    assert {mode(path) for path in shared if path.is_dir()} == {0o750}
    assert {mode(path) for path in shared if path.is_file()} == {0o640}
    assert paths.share_with_group(run) == 0, "a second look has nothing to do"


def test_a_step_directory_in_flight_is_left_alone(run: Path) -> None:
    paths.share_with_group(run)

    assert mode(run / "checkpoints" / ".tmp-step_00000020.abc") == 0o700


def test_links_and_pipes_lead_nowhere(run: Path, tmp_path: Path) -> None:
    """Somebody's link to a private file of ours must not open that file."""
    secret = tmp_path / "secret"
    private = tmp_path / "private"
    secret.write_text("x")
    private.mkdir()
    (private / "key").write_text("x")
    for path in (secret, private / "key"):
        path.chmod(0o600)
    private.chmod(0o700)
    (run / "linked").symlink_to(secret)
    (run / "checkpoints" / "elsewhere").symlink_to(private)
    os.mkfifo(run / "pipe", 0o600)

    paths.share_with_group(run)

    assert (mode(secret), mode(private), mode(private / "key"), mode(run / "pipe")) == (0o600, 0o700, 0o600, 0o600)


def test_a_run_directory_that_is_a_link_is_refused(run: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(run)

    with pytest.raises(OSError, match="link"):
        paths.share_with_group(tmp_path / "link")

    assert mode(run / "journal.jsonl") == 0o600


def test_what_appears_while_a_run_is_under_way_is_shared_at_the_end(run: Path) -> None:
    with paths.kept(run, wanted=True, every_s=3600):
        (run / "late").write_text("x")
        (run / "late").chmod(0o600)

    assert mode(run / "late") == 0o640


def test_nothing_is_shared_where_nobody_asked_for_it(run: Path) -> None:
    with paths.kept(run, wanted=False):
        pass

    assert mode(run / "journal.jsonl") == 0o600
