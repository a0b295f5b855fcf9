"""Planted files: pipes do not hold us up, links lead nowhere, asks of others are not heard."""

import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from stepkeeper.cli.main import main
from stepkeeper.core.exits import ExitCode
from stepkeeper.errors import StepkeeperError
from stepkeeper.run_store import journal, requests
from stepkeeper.run_store import lease as run_store_lease
from stepkeeper_trainer.formats import lease, lineage, records
from stepkeeper_trainer.formats import metadata as metadata_format
from stepkeeper_trainer.formats.lease import Lease
from stepkeeper_trainer.formats.plain import open_plain, read_plain
from tests.hostile.planting import reseal_metadata
from tests.reading import build

OURS = Lease(job_id=1, restart_count=0, attempt=0, node="n1", pid=1, taken_at=0.0)
READERS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "lease": (lease.LEASE_NAME, lease.read),
    "outcome": (records.OUTCOME_NAME, records.read_outcome),
    "lineage": (lineage.LINEAGE_NAME, lineage.read),
    "journal": ("journal.jsonl", lambda run: list(journal.read(run / "journal.jsonl"))),
}


@pytest.mark.parametrize("what", READERS)
@pytest.mark.timeout(120)
def test_a_pipe_in_the_place_of_a_file_holds_nobody_up(tmp_path: Path, what: str) -> None:
    name, read = READERS[what]
    os.mkfifo(tmp_path / name)

    with pytest.raises(OSError, match="not a plain file"):
        read(tmp_path)


@pytest.mark.parametrize("what", READERS)
def test_a_link_in_the_place_of_a_file_is_not_followed(tmp_path: Path, what: str) -> None:
    name, read = READERS[what]
    (tmp_path / "other").write_text("{}")
    (tmp_path / name).symlink_to(tmp_path / "other")

    with pytest.raises(OSError, match="symbolic links"):
        read(tmp_path)


def test_a_planted_pipe_is_named_at_the_start(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / lease.LEASE_NAME)

    with pytest.raises(StepkeeperError, match="not a plain file"):
        run_store_lease.take(tmp_path, OURS, job_runs=lambda _: False)


def test_the_lease_replaces_a_link_and_leaves_its_target(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("precious")
    (tmp_path / lease.LEASE_NAME).symlink_to(tmp_path / "victim")

    lease.write(tmp_path, OURS)

    assert (tmp_path / "victim").read_text() == "precious"
    assert lease.read(tmp_path) == OURS


def test_lines_are_not_appended_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("precious\n")
    (tmp_path / lineage.LINEAGE_NAME).symlink_to(tmp_path / "victim")

    with pytest.raises(OSError, match="symbolic links"):
        lineage.append(tmp_path, lineage.Rollback(at=1.0, save_id=None, why="x"))

    assert (tmp_path / "victim").read_text() == "precious\n"


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file away")
def test_an_ask_of_somebody_else_is_not_heard(tmp_path: Path) -> None:
    ask = requests.Request(kind="stop", job_id=7, at=time.time())
    ours = requests.write(tmp_path, ask)
    theirs = requests.write(tmp_path, ask)
    os.chown(tmp_path / requests.DIRECTORY / theirs, 12345, 12345)
    os.mkfifo(tmp_path / requests.DIRECTORY / "stop-pipe")
    (tmp_path / requests.DIRECTORY / "stop-link").symlink_to(tmp_path / requests.DIRECTORY / ours)

    assert list(requests.waiting(tmp_path, 7)) == [ours]


# --- in the directories of a run --------------------------------------------------------------------------------------

ALICE, BOB = 54321, 54322  # user ids that nobody has: the run's owner, and who plants
as_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file away")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run that is under way, with a step."""
    made = build.make_run(tmp_path / "run")
    build.make_steps(made, 1)
    build.write_status(made)
    return made.path


def give(path: Path, user: int) -> None:
    for each in (path, *path.rglob("*")):
        os.chown(each, user, user, follow_symlinks=False)


def test_no_directory_on_the_way_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "elsewhere" / "below").mkdir(parents=True)
    (tmp_path / "elsewhere" / "below" / "file").write_text("x")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "way").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")

    with pytest.raises(OSError, match="Not a directory"):
        read_plain(tmp_path / "run" / "way" / "below" / "file", within=tmp_path / "run")
    with pytest.raises(OSError, match="leads out"):
        read_plain(tmp_path / "run" / ".." / "elsewhere" / "below" / "file", within=tmp_path / "run")
    assert read_plain(tmp_path / "link" / "below" / "file", within=tmp_path / "link") == b"x", "links may lead there"


@as_root
def test_what_belongs_to_a_stranger_is_not_read(tmp_path: Path) -> None:
    """A group that may write the directory, by an ACL for instance, must not speak for its owner."""
    for user, place in ((ALICE, "hers"), (BOB, "his")):
        (tmp_path / place / "below").mkdir(parents=True)
        (tmp_path / place / "below" / "file").write_text("x")
        give(tmp_path / place, user)
    hers = tmp_path / "hers" / "below" / "file"
    assert read_plain(hers, within=tmp_path / "hers") == b"x"
    os.chown(hers, 0, 0)
    assert read_plain(hers, within=tmp_path / "hers") == b"x", "root's counts"
    os.chown(hers, BOB, BOB)
    with pytest.raises(OSError, match=f"belongs to user id {BOB}, and the directory to {ALICE}"):
        open_plain(hers, within=tmp_path / "hers")
    os.rename(tmp_path / "his" / "below", tmp_path / "hers" / "planted")
    with pytest.raises(OSError, match=f"belongs to user id {BOB}"):
        open_plain(tmp_path / "hers" / "planted" / "file", within=tmp_path / "hers")


def test_a_file_that_is_too_large_or_a_hole_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    os.truncate(tmp_path / "file", 10**12)

    with pytest.raises(OSError, match="more than 1048576 bytes"):
        read_plain(tmp_path / "file", within=tmp_path)


@pytest.mark.parametrize("newest_first", [False, True])
@pytest.mark.timeout(120)
def test_a_journal_of_a_terabyte_without_a_line_is_refused_in_time(tmp_path: Path, *, newest_first: bool) -> None:
    (tmp_path / "journal.jsonl").touch()
    os.truncate(tmp_path / "journal.jsonl", 10**12)

    with pytest.raises(OSError, match="are no lines"):
        list(journal.read_lines(tmp_path / "journal.jsonl", newest_first=newest_first))


@pytest.mark.parametrize("kind", ["save", "stop"])
def test_an_ask_goes_through_no_link(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str) -> None:
    """Root's file came to wherever the run's owner wanted it."""
    (tmp_path / "elsewhere").mkdir()
    (run / requests.DIRECTORY).symlink_to(tmp_path / "elsewhere")

    assert main([kind, str(run), "--within", "0.01"]) == ExitCode.RUN_DIRECTORY
    assert "asks: Not a directory" in capsys.readouterr().err
    assert not os.listdir(tmp_path / "elsewhere")


@as_root
def test_what_root_asks_can_be_read_and_answered_by_the_runs_owner() -> None:
    with tempfile.TemporaryDirectory() as place:
        os.chmod(place, 0o711)  # noqa: S103 - so that she comes to her run
        run = Path(place, "run")
        run.mkdir(mode=0o700)
        give(run, ALICE)
        name = requests.write(run, requests.Request(kind="save", job_id=7, at=1.0, by="root"))
        answered_by(run, name)
        answered = requests.read_answer(run, name)
        assert requests.waiting(run, 7) == {}

    assert answered is not None
    assert answered.said == "done"


def answered_by(run: Path, name: str) -> None:
    """Have an ask answered by a process of the run's owner."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.setresgid(ALICE, ALICE, ALICE)
            os.setresuid(ALICE, ALICE, ALICE)
            if [*requests.waiting(run, 7)] == [name]:
                requests.answer(run, name, requests.Answer(said="done", ok=True, at=2.0))
                code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize("name", ["attempts/attempt-000/config.json", "checkpoints/.tiers-id", "keeping.json"])
@pytest.mark.timeout(120)
def test_tiers_waits_for_no_pipe(run: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    (run / name).parent.mkdir(parents=True, exist_ok=True)
    if name.endswith("-id"):
        (run / "attempts" / "attempt-000").mkdir(parents=True)
        settings = {"local_tier": {"value": "/nowhere"}, "cold_tier": {"value": None}}
        (run / "attempts" / "attempt-000" / "config.json").write_text(json.dumps({"settings": settings}))
    os.mkfifo(run / name)

    assert main(["checkpoints", "tiers", str(run)]) == ExitCode.FINISHED
    assert "shared" in capsys.readouterr().out


@as_root
def test_the_places_that_another_users_run_names_are_not_visited_in_our_name(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {"local_tier": {"value": None}, "cold_tier": {"value": str(tmp_path / "cold")}}
    (run / "attempts" / "attempt-000").mkdir(parents=True)
    (run / "attempts" / "attempt-000" / "config.json").write_text(json.dumps({"settings": settings}))
    (tmp_path / "cold").mkdir()
    main(["checkpoints", "tiers", str(run)])
    assert "cold" in capsys.readouterr().out
    give(run, ALICE)

    assert main(["checkpoints", "tiers", str(run)]) == ExitCode.FINISHED
    said = capsys.readouterr()
    assert str(tmp_path / "cold") not in said.out
    assert "not visited in your name" in said.err
    main(["checkpoints", "tiers", str(run), "--cold", str(tmp_path / "cold")])
    assert str(tmp_path / "cold") in capsys.readouterr().out, "but who names one looks there"


@as_root
@pytest.mark.parametrize("name", ["checkpoints", "logs"])
def test_a_part_of_a_run_that_is_a_strangers_is_named(run: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    give(run, ALICE)
    (run / name).mkdir(exist_ok=True)
    os.chown(run / name, BOB, BOB)
    assert main(["report", str(run), "--json"]) == ExitCode.RUN_DIRECTORY
    assert f"{name}: belongs to user id {BOB}, and the run to {ALICE}" in capsys.readouterr().err

    os.rename(run / name, run.parent / "away")
    (run / name).symlink_to(run.parent / "away")
    os.chown(run / name, ALICE, ALICE, follow_symlinks=False)
    assert main(["report", str(run), "--json"]) == ExitCode.RUN_DIRECTORY
    assert f"{name}: is a symbolic link of user id {ALICE}" in capsys.readouterr().err


def bomb(levels: int) -> bytes:
    """Return a pickle whose key holds each tuple twice: to hash it takes 2 ** levels steps."""
    nested = b"".join(b"h" + bytes([level]) + b"\x86\x94" for level in range(levels))
    return b"\x80\x04}N\x85\x94" + nested + b"Ns."


def hoard(count: int) -> bytes:
    """Return a pickle that makes a set, of 216 bytes, of each of its own."""
    return b"\x80\x04(" + b"\x8f" * count + b"t."


@as_root
@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        (bomb(100), ["ls", "RUN"]),
        (bomb(100), ["export", "STEP", "OUT"]),
        (hoard(2_000_000), ["verify", "STEP"]),
    ],
    ids=["time ls", "time export", "memory verify"],
)
def test_a_metadata_of_another_user_that_takes_all_time_or_memory_is_not_loaded(
    run: Path,
    metadata: bytes,
    words: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(metadata_format, "TRIED_S", 1)
    monkeypatch.setattr(metadata_format, "TRIED_BYTES", 64 * 1024 * 1024)
    step = run / "checkpoints" / "step_00000100"
    (step / ".metadata").write_bytes(metadata)
    reseal_metadata(step)
    give(run, ALICE)
    places = {"RUN": str(run), "STEP": str(step), "OUT": str(run.parent / "out")}

    code = main(["checkpoints", *(places.get(word, word) for word in words)])

    said = capsys.readouterr()
    assert "it was not loaded" in said.out + said.err
    assert code == (ExitCode.FINISHED if words[0] == "ls" else ExitCode.NOT_VERIFIED)
