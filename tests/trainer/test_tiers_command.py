"""`stepkeeper checkpoints tiers` and `copy`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from stepkeeper.cli.main import main
from stepkeeper_trainer.formats import lineage
from stepkeeper_trainer.formats.verify import verify
from stepkeeper_trainer.tiers.directory import LocalTier
from stepkeeper_trainer.tiers.tier import IDENTITY_NAME, Tiers
from tests.trainer.s3_server import s3_server, variables
from tests.trainer.test_tiers import make_step, make_steps


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    with s3_server() as endpoint:
        yield endpoint


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of two steps; its newest attempt has a local tier and a cold one."""
    path = tmp_path / "run"
    make_steps(path / "checkpoints", 2)
    (path / "journal.jsonl").touch()
    (path / "checkpoints" / IDENTITY_NAME).write_text("0123456789abcdef")
    settings = {"local_tier": {"value": str(tmp_path / "disk")}, "cold_tier": {"value": str(tmp_path / "cold")}}
    attempt = path / "attempts" / "attempt-000"
    attempt.mkdir(parents=True)
    (attempt / "config.json").write_text(json.dumps({"format": 1, "settings": settings}))
    return path


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    capsys.readouterr()
    code = main(["checkpoints", *arguments])
    return code, capsys.readouterr().out


def test_tiers_says_what_each_has_and_how_far_copies_lag(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert told(capsys, "copy", str(run), "--step", "100", "--to", str(tmp_path / "cold"))[0] == 0
    place = Tiers(local=str(tmp_path / "disk")).local_checkpoints(run, "0123456789abcdef", "n1")
    assert place is not None
    part = make_step(place, 300)
    (part / "__1_0.distcp").unlink()
    assert LocalTier(place, keep=1).steps()
    code, out = told(capsys, "tiers", str(run), "--json")
    assert code == 0
    found = json.loads(out)
    by_kind = {tier["kind"]: tier for tier in found["tiers"]}
    assert [(tier["kind"], tier["newest"], tier["lag_steps"]) for tier in found["tiers"]] == [
        ("local", None, None), ("shared", 200, 0), ("cold", 100, 100),
    ]  # fmt: skip
    [copy] = by_kind["local"]["steps"]
    assert (copy["state"], copy["files"], copy["of"]) == ("part", 2, 3)
    assert {copy["state"] for copy in by_kind["shared"]["steps"]} == {"complete"}
    _, out = told(capsys, "tiers", str(run), "--deep")
    assert "newest step 100, 100 steps behind" in out
    assert "2 of 3 files" in out
    assert "verified" in out


def test_snapshots_in_this_nodes_memory_are_shown_beside_the_other_tiers(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURMD_NODENAME", "n1")
    record = run / "attempts" / "attempt-000" / "config.json"
    recorded = json.loads(record.read_text())
    recorded["settings"] |= {"snapshot_every": {"value": "5 steps"}, "snapshot_dir": {"value": str(tmp_path / "shm")}}
    record.write_text(json.dumps(recorded))
    tiers = Tiers(snapshot_every="5 steps", snapshot_directory=str(tmp_path / "shm"))
    make_step(tiers.snapshots_of(run, "0123456789abcdef", "n1"), 205)
    code, out = told(capsys, "tiers", str(run), "--json")
    assert code == 0
    found = json.loads(out)["tiers"]
    assert (found[0]["kind"], found[0]["newest"], found[0]["lag_steps"]) == ("memory", 205, -5)
    _, out = told(capsys, "tiers", str(run))
    assert "MEMORY" in out


def test_damage_in_a_tier_is_shown_and_a_tier_that_does_not_answer_too(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = run / "checkpoints" / "step_00000200" / "__0_0.distcp"
    bad.write_bytes(b"?" * bad.stat().st_size)
    (tmp_path / "file").write_text("no directory")
    _, out = told(capsys, "tiers", str(run), "--deep", "--cold", str(tmp_path / "file"), "--json")
    by_kind = {tier["kind"]: tier for tier in json.loads(out)["tiers"]}
    assert [copy["state"] for copy in by_kind["shared"]["steps"]] == ["damaged", "verified"]
    assert "bytes of chunk 0" in by_kind["shared"]["steps"][0]["problem"]
    assert "Not a directory" in by_kind["cold"]["error"]


def test_a_step_goes_to_an_object_store_and_comes_back_when_all_is_lost(
    run: Path, s3: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables(s3).items():
        monkeypatch.setenv(name, value)
    code, out = told(capsys, "copy", str(run), "--all", "--zstd", "1", "--to", "s3://bucket/by-hand", "--json")
    assert code == 0
    assert [each["step"] for each in json.loads(out)["steps"]] == [200, 100]
    _, out = told(capsys, "tiers", str(run), "--cold", "s3://bucket/by-hand", "--json", "--deep")
    cold = json.loads(out)["tiers"][-1]
    assert [copy["state"] for copy in cold["steps"]] == ["verified", "verified"]
    for path in (run / "checkpoints").glob("step_*"):
        path.rename(run / f"lost-{path.name}")
    code, out = told(capsys, "copy", str(run), "--from", "s3://bucket/by-hand", "--json")
    assert code == 0
    assert json.loads(out)["directory"] == "step_00000200"
    assert verify(run / "checkpoints" / "step_00000200").ok
    again, out = told(capsys, "copy", str(run), "--from", "s3://bucket/by-hand", "--json")
    assert (again, json.loads(out)["came_from"]) == (0, str(run / "checkpoints"))


def test_a_step_that_was_rolled_back_does_not_come_back(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert told(capsys, "copy", str(run), "--all", "--to", str(tmp_path / "cold"))[0] == 0
    known = lineage.read(run / "checkpoints")
    assert known is not None
    first = known.chain()[-1]
    lineage.append(run / "checkpoints", lineage.Rollback(at=4e9, save_id=first, why="a loss spike"))
    for path in (run / "checkpoints").glob("step_*"):
        path.rename(run / f"lost-{path.name}")
    _, out = told(capsys, "copy", str(run), "--from", str(tmp_path / "cold"), "--json")
    assert json.loads(out)["step"] == 100


@pytest.mark.parametrize(
    ("arguments", "code", "problem"),
    [
        (["--to", "s3://me:secret@bucket/x"], 2, "holds no credentials"),
        (["--to", "/cold", "--zstd", "3"], 2, "object stores only"),
        (["--to", "/cold", "--max-rate", "-1"], 2, "more than 0"),
        (["--to", "/cold", "--step", "999"], 40, "step 999 of the current lineage is not there"),
        (["--from", "/nowhere/at/all"], 40, "no step of this run"),
    ],
)
def test_what_cannot_be_done_is_said(
    run: Path, arguments: list[str], code: int, problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if problem == "no step of this run":
        for path in (run / "checkpoints").glob("step_*"):
            path.rename(run / f"lost-{path.name}")
    assert main(["checkpoints", "copy", str(run), *arguments]) == code
    said = capsys.readouterr().err
    assert problem in said
    assert "secret" not in said


def test_a_damaged_step_is_not_copied(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = run / "checkpoints" / "step_00000200" / "__0_0.distcp"
    bad.write_bytes(b"?" * bad.stat().st_size)
    assert main(["checkpoints", "copy", str(run), "--step", "200", "--to", str(tmp_path / "cold")]) == 41
    code, out = told(capsys, "copy", str(run), "--to", str(tmp_path / "cold"))
    assert code == 0
    assert "step_00000100" in out
