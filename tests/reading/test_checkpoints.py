from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path

import msgspec
import pytest

from stepkeeper.core import events as on
from stepkeeper.core.exits import ExitCode
from stepkeeper.run_store.paths import RunDirectory
from stepkeeper_trainer.formats import lineage
from stepkeeper_trainer.formats.manifest import CHUNK_BYTES, FileEntry, Manifest, seal
from tests import dcp_files
from tests.reading import build
from tests.reading.conftest import Command

BYTES = len(build.DATA) + len(build.METADATA)


def bit_flip(step: Path) -> None:
    path = step / "__0_0.distcp"
    before, data = path.stat().st_mtime_ns, bytearray(path.read_bytes())
    data[130] ^= 1
    while path.stat().st_mtime_ns == before:  # a change within a tick of the kernel's clock would not show
        path.write_bytes(data)


def truncate(step: Path) -> None:
    os.truncate(step / "__0_0.distcp", 199)


def lose_file(step: Path) -> None:
    (step / "__0_0.distcp").unlink()


def lose_manifest(step: Path) -> None:
    (step / "MANIFEST.json").unlink()


def tear_manifest(step: Path) -> None:
    os.truncate(step / "MANIFEST.json", 100)


def change_manifest(step: Path) -> None:
    data = (step / "MANIFEST.json").read_bytes()
    (step / "MANIFEST.json").write_bytes(data.replace(b'"world_size":2', b'"world_size":3'))


def add_file(step: Path) -> None:
    (step / "extra\x1b[2J").write_bytes(b"")


def link_file(step: Path) -> None:
    (step / "__0_0.distcp").rename(step.parent / "kept")
    (step / "__0_0.distcp").symlink_to("../kept")


def link_manifest(step: Path) -> None:
    (step / "MANIFEST.json").rename(step.parent / "kept")
    (step / "MANIFEST.json").symlink_to("../kept")


def pipe_file(step: Path) -> None:
    (step / "__0_0.distcp").unlink()
    os.mkfifo(step / "__0_0.distcp")


def reseal(directory: Path, **changes: object) -> None:
    manifest = msgspec.json.decode((directory / "MANIFEST.json").read_bytes(), type=Manifest)
    (directory / "MANIFEST.json").write_bytes(seal(msgspec.structs.replace(manifest, **changes)))


def escape_path(step: Path) -> None:
    reseal(step, files={"../../../secret": build.entry(build.DATA)})


def absolute_path(step: Path) -> None:
    reseal(step, files={"/etc/passwd": build.entry(build.DATA)})


def newer_format(step: Path) -> None:
    reseal(step, format=2)


def other_step(step: Path) -> None:
    reseal(step, step=5)


def nonsense_chunks(step: Path) -> None:
    reseal(
        step,
        files={
            "__0_0.distcp": FileEntry(bytes=200, xxh3_128="0" * 32, chunk_bytes=0, chunks=()),
            ".metadata": FileEntry(bytes=200, xxh3_128="0" * 32, chunk_bytes=CHUNK_BYTES, chunks=()),
        },
    )


def huge_chunks(step: Path) -> None:
    """A reader holds a chunk in memory: so much of it must not be asked for."""
    reseal(
        step,
        files={".metadata": FileEntry(bytes=200, xxh3_128="0" * 32, chunk_bytes=CHUNK_BYTES * 10**9, chunks=("x",))},
    )


DAMAGES = [
    (bit_flip, "chunk 2 (from byte 128)"),
    (truncate, "has 199 bytes, the manifest says 200"),
    (lose_file, "missing"),
    (lose_manifest, "never committed"),
    (tear_manifest, "torn"),
    (change_manifest, "does not match its own digest"),
    (add_file, "not in the manifest"),
    (link_file, "not a plain file"),
    (link_manifest, "MANIFEST.json"),
    (pipe_file, "not a plain file"),
    (escape_path, "not a plain path inside"),
    (absolute_path, "not a plain path inside"),
    (newer_format, "upgrade Stepkeeper"),
    (other_step, "its manifest is of step 5"),
    (nonsense_chunks, "does not list its chunks"),
    (huge_chunks, "not a manifest: Expected `int` <= 268435456"),
]
damaged = pytest.mark.parametrize(("damage", "words"), DAMAGES, ids=[d.__name__ for d, _ in DAMAGES])


@damaged
def test_a_damaged_newest_step_is_passed_over_and_named(
    command: Command, run: RunDirectory, damage: object, words: str
) -> None:
    _, before, newest = build.make_steps(run)
    damage(newest)  # type: ignore[operator]
    files = sorted(str(path) for path in run.path.rglob("*"))

    latest = command("checkpoints", "latest", run.path)

    assert (latest.code, latest.out) == (0, f"{before}\n")
    assert "passed over step_00000300" in latest.err
    assert words in latest.err
    assert "\x1b" not in latest.err
    assert {str(path) for path in run.path.rglob("*")}.issuperset(files), "nothing is removed"


@damaged
def test_verify_names_what_is_wrong(command: Command, run: RunDirectory, damage: object, words: str) -> None:
    step = build.make_steps(run)[-1]
    damage(step)  # type: ignore[operator]

    said = command("checkpoints", "verify", step)
    assert said.code == 41
    assert words in said.out
    assert "\x1b" not in said.out

    document = json.loads(command("checkpoints", "verify", step, "--json").out)
    assert document["ok"] is False
    assert any(words in problem for problem in document["problems"])


@damaged
def test_ls_shows_each_damage_that_sizes_tell(command: Command, run: RunDirectory, damage: object, words: str) -> None:
    damage(build.make_steps(run)[-1])  # type: ignore[operator]

    said = command("checkpoints", "ls", run.path)

    assert said.code == 0
    line = said.out.splitlines()[1]
    assert words, "named in full by verify; a table has room for a part"
    assert line.startswith("step_00000300")
    assert ("committed, not yet verified" if damage is bit_flip else "damaged: ") in line


def states(command: Command, run: RunDirectory) -> list[str]:
    table = [line.rsplit("  ", 1)[1] for line in command("checkpoints", "ls", run.path).out.splitlines()[1:]]
    rows = json.loads(command("checkpoints", "ls", run.path, "--json").out)["steps"]
    assert [line.partition(":")[0] for line in table] == [row["state"] for row in rows]
    assert [row["complete"] for row in rows] == [row["state"] != "damaged" for row in rows]
    return table


@pytest.mark.parametrize("found_by", ["verify", "latest"])
def test_ls_says_verified_and_damaged_as_the_last_reading_found(
    command: Command, run: RunDirectory, monkeypatch: pytest.MonkeyPatch, found_by: str
) -> None:
    """Only of bytes that were read, and of files that nobody has written to since."""
    monkeypatch.setattr("stepkeeper_trainer.formats.verify.SETTLED_S", -1e9)  # the files are new
    first, second, third = build.make_steps(run)
    assert states(command, run) == ["committed, not yet verified"] * 3
    command("checkpoints", "verify", second)
    bit_flip(third)

    for _ in range(2):
        assert command("checkpoints", found_by, third if found_by == "verify" else run.path).code in (0, 41)
        damaged, good, unread = states(command, run)
        assert damaged.startswith("damaged: __0_0.distcp: bytes of chunk 2 ")
        assert (good, unread) == ("verified", "committed, not yet verified")
    bit_flip(third)  # and back
    assert states(command, run)[0] == "committed, not yet verified"
    command("checkpoints", "verify", third)
    bit_flip(second)
    assert states(command, run) == ["verified", "committed, not yet verified", "committed, not yet verified"]
    assert first.is_dir()


def test_ls_believes_the_journal_of_files_that_are_as_they_were(command: Command, run: RunDirectory) -> None:
    """The watchers of several nodes read a step together, on whose word the supervisor goes on."""
    old = time.time() - 1000
    for step in build.make_steps(run):
        for path in step.iterdir():
            os.utime(path, (old, old))
    bad = on.Skipped(directory=str(run.checkpoints / "step_00000300"), problem="__0_0.distcp: wrong", damaged=True)
    chosen = on.CheckpointChosen(
        at=time.time(), directory=str(run.checkpoints / "step_00000200"), step=200, skipped=(bad,)
    )
    build.write_journal(run, [build.record(chosen, attempt=0)])

    assert states(command, run) == ["damaged: __0_0.distcp: wrong", "verified", "committed, not yet verified"]
    for path in (run.checkpoints / "step_00000200").iterdir():
        os.utime(path, (time.time() + 60,) * 2)
    assert states(command, run)[1] == "committed, not yet verified"


def test_every_byte_right(command: Command, run: RunDirectory) -> None:
    step = build.make_steps(run)[-1]

    said = command("checkpoints", "verify", step)
    assert (said.code, said.out) == (0, f"{step}: verified: every byte is right ({BYTES} B read)\n")

    document = json.loads(command("checkpoints", "verify", step, "--json").out)
    assert document == {
        "directory": str(step),
        "ok": True,
        "state": "verified",
        "deep": True,
        "bytes_read": BYTES,
        "bytes_known": 0,
        "problems": [],
        "left_out": [],
    }


def test_shallow_reads_sizes_only(command: Command, run: RunDirectory) -> None:
    step = build.make_steps(run)[-1]
    bit_flip(step)

    assert command("checkpoints", "verify", step, "--shallow").code == 0
    assert command("checkpoints", "verify", step).code == 41
    assert command("checkpoints", "latest", run.path, "--shallow").out == f"{step}\n"
    truncate(step)
    assert command("checkpoints", "verify", step, "--shallow").code == 41


def test_verify_reads_all_bytes_unless_asked_not_to(
    command: Command, run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stepkeeper_trainer.formats.verify.SETTLED_S", -1e9)  # the files are new
    step = build.make_steps(run)[-1]
    assert "B read)" in command("checkpoints", "verify", step).out

    assert "(0 B read, " in command("checkpoints", "verify", step, "--cached").out
    assert json.loads(command("checkpoints", "verify", step, "--json").out)["bytes_read"] == BYTES
    known = json.loads(command("checkpoints", "verify", step, "--cached", "--json").out)
    assert (known["bytes_read"], known["bytes_known"]) == (0, BYTES)
    bit_flip(step)
    assert command("checkpoints", "verify", step, "--cached").code == 41
    assert command("checkpoints", "latest", run.path).out == f"{step.parent / 'step_00000200'}\n"


def test_how_bytes_are_read_can_be_said(command: Command, run: RunDirectory) -> None:
    step = build.make_steps(run)[-1]
    for option in (["--threads", "3"], ["--max-rate", "1.5G"], ["--from-disk"]):
        assert command("checkpoints", "verify", step, *option).code == 0
        assert command("checkpoints", "latest", run.path, "--no-cache", *option).out == f"{step}\n"
    for option in (["--threads", "0"], ["--max-rate", "fast"], ["--max-rate", "-1"], ["--max-rate", "nan"]):
        assert command("checkpoints", "verify", step, *option).code == 2


def test_several_problems_are_a_line_each(command: Command, run: RunDirectory) -> None:
    step = build.make_steps(run)[-1]
    truncate(step)
    add_file(step)
    (step / ".metadata").unlink()

    assert len(command("checkpoints", "verify", step).out.splitlines()) == 1 + 3
    assert "(and 2 more)" in command("checkpoints", "ls", run.path).out


@pytest.mark.parametrize("where", ["", "checkpoints", "."])
def test_latest_takes_the_run_directory_or_its_checkpoints(command: Command, run: RunDirectory, where: str) -> None:
    newest = build.make_steps(run)[-1]

    assert command("checkpoints", "latest", run.path / where).out == f"{newest}\n"


def test_latest_ends_with_1_where_there_is_none(command: Command, run: RunDirectory) -> None:
    """The contract that scripts rely on."""
    said = command("checkpoints", "latest", run.path)
    assert (said.code, said.out) == (1, "")

    lose_manifest(build.make_steps(run, 1)[0])
    said = command("checkpoints", "latest", run.checkpoints)
    assert (said.code, said.out) == (1, "")
    assert "passed over step_00000100" in said.err

    said = command("checkpoints", "latest", run.path, "--json")
    document = json.loads(said.out)
    assert (said.code, document["directory"], document["step"]) == (1, None, None)
    assert document["skipped"][0]["directory"].endswith("step_00000100")

    shutil.rmtree(run.checkpoints)
    build.write_status(run)
    assert command("checkpoints", "latest", run.path).code == 1


def test_a_save_in_flight_is_no_step(command: Command, run: RunDirectory) -> None:
    newest = build.make_steps(run)[-1]
    shutil.copytree(newest, run.checkpoints / ".tmp-step_00000400.abc")
    (run.checkpoints / "step_00000500").write_text("a file")
    (run.checkpoints / "step_00000600").symlink_to(newest)

    assert command("checkpoints", "latest", run.path).out == f"{newest}\n"
    assert len(command("checkpoints", "ls", run.path).out.splitlines()) == 4


def test_after_a_rollback_the_replayed_step_counts(command: Command, run: RunDirectory) -> None:
    first, second, third = build.make_steps(run)
    back = lineage.Rollback(at=build.START, save_id="00000000-save", why="resumed from step_00000100")
    lineage.append(run.checkpoints, back)
    assert command("checkpoints", "latest", run.path).out == f"{first}\n"

    replayed = build.make_step(run, 200, save_id="deadbeef-save", parent="00000000-save", name="step_00000200.deadbeef")

    assert command("checkpoints", "latest", run.path).out == f"{replayed}\n"
    rows = json.loads(command("checkpoints", "ls", run.path, "--json").out)["steps"]
    current = {row["directory"] for row in rows if row["current"]}
    assert current == {"step_00000100", "step_00000200.deadbeef"}
    table = command("checkpoints", "ls", run.path).out
    assert table.count("not on the current lineage") == 2
    bit_flip(replayed)
    assert command("checkpoints", "latest", run.path).out == f"{first}\n"
    assert {second.is_dir(), third.is_dir()} == {True}


def test_marks_are_shown(command: Command, run: RunDirectory) -> None:
    build.make_steps(run)
    for save, mark in ((0, "pinned"), (2, "suspect"), (1, "pinned")):
        lineage.append(run.checkpoints, lineage.Mark(at=1.0, save_id=f"{save:08x}-save", mark=mark))
    lineage.append(run.checkpoints, lineage.Mark(at=1.0, save_id="00000001-save", mark="pinned", value=False))

    said = command("checkpoints", "ls", run.path).out.splitlines()

    assert [line.rsplit("  ", 1)[1] for line in said] == [
        "STATE",
        "committed, not yet verified; suspect",
        "committed, not yet verified",
        "committed, not yet verified; pinned",
    ]


def test_without_a_lineage_every_step_counts(command: Command, run: RunDirectory) -> None:
    newest = build.make_steps(run)[-1]
    (run.checkpoints / "lineage.jsonl").unlink()

    assert command("checkpoints", "latest", run.path).out == f"{newest}\n"


def test_torn_lineage_lines_hide_no_other(command: Command, run: RunDirectory) -> None:
    newest = build.make_steps(run)[-1]
    path = run.checkpoints / "lineage.jsonl"
    path.write_bytes(b"\xff{torn\n" + path.read_bytes() + b'{"record":"rollb')

    assert command("checkpoints", "latest", run.path).out == f"{newest}\n"


def test_a_torn_commit_line_in_the_middle_hides_no_older_step(command: Command, run: RunDirectory) -> None:
    first, second, third = build.make_steps(run)
    path = run.checkpoints / "lineage.jsonl"
    one, two, three = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(one + two[:20] + b"\n" + three)
    bit_flip(third)

    assert command("checkpoints", "latest", run.path).out == f"{second}\n"
    bit_flip(second)
    assert command("checkpoints", "latest", run.path).out == f"{first}\n"


def test_a_commit_that_was_renamed_but_not_recorded_counts(command: Command, run: RunDirectory) -> None:
    build.make_steps(run, 2)
    orphan = build.make_step(run, 300, save_id="00000002-save", parent="00000001-save", recorded=False)

    assert command("checkpoints", "latest", run.path).out == f"{orphan}\n"


def test_the_json_of_ls(command: Command, run: RunDirectory) -> None:
    build.make_steps(run, 2)

    document = json.loads(command("checkpoints", "ls", run.path, "--json").out)

    assert document["checkpoints"] == str(run.checkpoints)
    assert [row["step"] for row in document["steps"]] == [200, 100]
    assert document["steps"][0] == {
        "directory": "step_00000200",
        "step": 200,
        "tokens": 200_000,
        "bytes": BYTES,
        "created_at": "2026-09-21T00:02:00Z",
        "world_size": 2,
        "loss": 2.5,
        "save_id": "00000001-save",
        "parent": "00000000-save",
        "complete": True,
        "state": "committed, not yet verified",
        "current": True,
        "marks": [],
        "left_out": [],
        "problems": [],
    }


def test_what_a_manifest_says_cannot_act_on_the_terminal(command: Command, run: RunDirectory) -> None:
    step = build.make_steps(run, 1)[0]
    reseal(step, created_at="\x1b[2J\u202e" * 50, tokens=10**18, loss=None)

    said = command("checkpoints", "ls", run.path)

    assert said.code == 0
    assert not set(said.out) & set("\x1b\u202e")


@pytest.mark.parametrize("which", ["ls", "verify", "latest"])
@pytest.mark.parametrize("where", ["nowhere", "file", "4711", "x" * 300])
def test_what_is_not_there_is_said_in_one_line(command: Command, tmp_path: Path, which: str, where: str) -> None:
    (tmp_path / "file").write_text("")

    said = command("checkpoints", which, where)

    assert said.code in (40, 32)
    assert said.out == ""
    assert said.err.startswith("stepkeeper: ")
    assert said.err.count("\n") == 1


def test_a_directory_without_steps_is_told_from_one_that_has_none_yet(command: Command, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()

    assert command("checkpoints", "latest", "other").code == 40
    assert command("checkpoints", "verify", "other").code == 41
    assert "name a run directory" in command("checkpoints", "ls", "other").err


def test_a_subcommand_is_asked_for(command: Command) -> None:
    for argv in (
        ["checkpoints"],
        ["checkpoints", "prune"],
        ["checkpoints", "ls"],
        ["checkpoints", "ls", "a", "b"],
    ):
        said = command(*argv)
        assert said.code == 2
        assert "--help" in said.err


def test_prune_says_what_it_removes_and_why_the_rest_stays(command: Command, run: RunDirectory) -> None:
    build.make_steps(run, 5)
    pinned = run.checkpoints / "step_00000100"
    assert command("checkpoints", "pin", pinned).code == 0

    dry = command("checkpoints", "prune", run.path, "--dry-run", "--retention", "newest 2")
    assert dry.code == 0
    assert dry.out.count("would be removed") == 2
    assert len(list(run.checkpoints.glob("step_*"))) == 5

    said = command("checkpoints", "prune", run.path, "--retention", "newest 2")
    assert "step_00000100  kept     pinned" in said.out
    assert said.out.count("removed  no rule keeps it") == 2
    assert sorted(path.name for path in run.checkpoints.glob("*step_*")) == [
        "step_00000100",
        "step_00000400",
        "step_00000500",
    ]

    assert command("checkpoints", "unpin", pinned).code == 0
    document = json.loads(command("checkpoints", "prune", run.path, "--retention", "newest 1", "--json").out)
    assert document["removed"] == ["step_00000100", "step_00000400"]
    assert document["kept"] == {"step_00000500": ["one of the newest 1"]}


def test_prune_without_a_rule_removes_nothing(command: Command, run: RunDirectory) -> None:
    steps = build.make_steps(run, 5)
    said = command("checkpoints", "prune", run.path)
    assert said.code == 2
    assert "--retention" in said.err
    assert all(step.is_dir() for step in steps)
    assert "would be removed" in command("checkpoints", "prune", run.path, "--dry-run").out


def test_prune_keeps_milestones_and_the_best(command: Command, run: RunDirectory) -> None:
    for step in range(100, 900, 100):
        build.make_step(run, step, save_id=f"{step}", parent=f"{step - 100}" if step > 100 else None, loss=step / 1000)

    build.write_status(run, total_steps=1000)
    rules = "newest 1, every 300 steps, best loss 1, every 50 percent"
    assert command("checkpoints", "prune", run.path, "--retention", rules).code == 0

    assert sorted(path.name for path in run.checkpoints.glob("step_*")) == [
        "step_00000100",
        "step_00000300",
        "step_00000500",
        "step_00000600",
        "step_00000800",
    ]


def test_prune_removes_nothing_while_the_newest_step_is_damaged(command: Command, run: RunDirectory) -> None:
    bit_flip(build.make_steps(run)[-1])

    said = command("checkpoints", "prune", run.path, "--retention", "newest 1")

    assert said.code == 0
    assert "step_00000300, is not verified" in said.err
    assert len(list(run.checkpoints.glob("step_*"))) == 3


def test_a_pin_alone_does_not_hide_the_steps_of_a_run_without_a_lineage(command: Command, run: RunDirectory) -> None:
    newest = build.make_steps(run)[-1]
    (run.checkpoints / "lineage.jsonl").unlink()

    command("checkpoints", "pin", newest)

    assert command("checkpoints", "latest", run.path).out == f"{newest}\n"


def test_prune_and_pin_say_what_is_wrong_with_their_words(command: Command, run: RunDirectory) -> None:
    step = build.make_steps(run)[-1]
    for rules, wrong in {
        "newest 0": "keep_last is below 1",
        "every 10 percent": "needs total_steps",  # which nobody has said
        "newest 3 every 5 steps": "cannot be read; write `all`, or some of `newest 3`",
        "all": "it keeps every step",
    }.items():
        said = command("checkpoints", "prune", run.path, "--retention", rules)
        assert said.code == 2
        assert wrong in said.err
    assert command("checkpoints", "pin", run.path / "nowhere").code == 40
    lose_manifest(step)
    assert command("checkpoints", "pin", step).code == 41
    assert len(list(run.checkpoints.glob("step_*"))) == 3


def test_several_damaged_steps_make_the_storage_suspect(command: Command, run: RunDirectory) -> None:
    for step in build.make_steps(run)[1:]:
        bit_flip(step)

    said = command("checkpoints", "latest", run.path)

    assert (said.code, said.out) == (0, f"{run.checkpoints / 'step_00000100'}\n")
    assert "the storage is suspect" in said.err
    assert "suspect" in json.loads(command("checkpoints", "latest", run.path, "--json").out)["suspicion"]


def test_storage_is_tested_on_request(command: Command, run: RunDirectory) -> None:
    said = command("checkpoints", "test-storage", run.path, "--bytes", "100k")
    assert said.code == 0
    assert "97.7 KiB durable in" in said.out
    assert json.loads(command("checkpoints", "test-storage", run.path, "--bytes", "1k", "--json").out)["ok"] is True

    assert command("checkpoints", "test-storage", run.path / "nowhere").code == 40
    gone = command("checkpoints", "test-storage", "/proc/self/fd", "--bytes", "1k")
    assert gone.code == 23
    assert "cannot make a directory" in gone.out


def test_verify_of_a_run_says_which_command_is_meant(tmp_path: Path, command: Command) -> None:
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)

    result = command("checkpoints", "verify", str(tmp_path / "run"))

    assert result.code == 2
    assert "a run's" in result.err
    assert "checkpoints latest" in result.err


HUGE = b"\x8a\xff" + b"\x7f" * 255  # a number of 614 digits, as a pickle has it
COMMANDS = [
    ["checkpoints", "verify", "STEP"],
    ["checkpoints", "ls", "RUN"],
    ["checkpoints", "latest", "RUN"],
    ["checkpoints", "tiers", "RUN", "--json"],
    ["checkpoints", "export", "STEP", "OUT"],
]


@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: words[1])
@pytest.mark.parametrize("dimensions", [1, 8, 40])
def test_a_sealed_step_of_huge_numbers_is_named_and_costs_no_time(
    command: Command, run: RunDirectory, tmp_path: Path, words: list[str], dimensions: int
) -> None:
    """Their product had more digits than Python writes: that was an uncaught error, after a minute."""
    (step,) = build.make_steps(run, 1)
    piece = dcp_files.Piece((0,) * dimensions, (201,) * dimensions, "__0_0.distcp", 0, 200)
    metadata = dcp_files.metadata({"model.weights": [piece]}).replace(b"K\xc9", HUGE)
    if metadata[2:3] == b"\x95":
        metadata = metadata[:2] + metadata[11:]  # the length of its frame
    (step / ".metadata").write_bytes(metadata)
    reseal(step, files={"__0_0.distcp": build.entry(build.DATA), ".metadata": build.entry(metadata)})
    places = {"STEP": step, "RUN": run.path, "OUT": tmp_path / "out"}
    began = time.process_time()

    said = command(*[places.get(word, word) for word in words])

    assert "numbers that a tensor can have" in said.out + said.err
    expected = {"ls": 0, "tiers": 0, "latest": 1}.get(words[1], ExitCode.NOT_VERIFIED)
    assert said.code == expected
    assert time.process_time() - began < 10
