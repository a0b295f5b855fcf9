"""What the ranks record of how steps are kept, and how the commands go by it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stepkeeper.cli.checkpoints import rules_in_words
from stepkeeper.run_store.paths import RunDirectory
from stepkeeper_trainer.formats import records
from stepkeeper_trainer.store.retention import Policy, parse_policy
from tests.reading import build
from tests.reading.conftest import Command

RULES: dict[str, int | float | str | bool | None] = {"keep_last": 2, "epochs": False}


def record(
    run: Path, *, attempt: int = 0, retention: dict[str, int | float | str | bool | None] | None = RULES, **places: str
) -> None:
    """Record as a launch does."""
    launch, at = f"{attempt}.0", build.START + attempt
    found = [records.Place(kind=kind, where=where, launch=launch, at=at) for kind, where in places.items()]  # type: ignore[arg-type]
    records.write_keeping(run, records.Keeping(launch=launch, at=at, retention=retention, places=tuple(found)))


def test_places_of_earlier_launches_stay_and_the_newest_of_a_kind_counts(tmp_path: Path) -> None:
    record(tmp_path, attempt=0, cold="/old", local="/disk")
    record(tmp_path, attempt=1, cold="/new")
    record(tmp_path, attempt=2)

    found = records.read_keeping(tmp_path)

    assert found is not None
    assert found.launch == "2.0"
    assert [(place.where, place.launch) for place in found.places] == [
        ("/new", "1.0"),
        ("/old", "0.0"),
        ("/disk", "0.0"),
    ]
    assert [getattr(found.now(kind), "where", None) for kind in ("local", "cold")] == ["/disk", "/new"]


def test_places_do_not_add_up_for_ever_and_hold_no_secret(tmp_path: Path) -> None:
    for attempt in range(records.PLACES_MAX + 5):
        record(tmp_path, attempt=attempt, cold=f"s3://me:hidden{attempt}@bucket/{attempt}?token=hidden")

    found = records.read_keeping(tmp_path)

    assert found is not None
    assert len(found.places) == records.PLACES_MAX
    assert found.places[0].where == f"s3://bucket/{records.PLACES_MAX + 4}"
    assert "hidden" not in (tmp_path / records.KEEPING_NAME).read_text()


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b'{"format": 1}', b'{"format": 99}'])
def test_a_record_that_cannot_be_read_is_an_error_and_the_next_launch_writes_a_new_one(
    tmp_path: Path, data: bytes
) -> None:
    (tmp_path / records.KEEPING_NAME).write_bytes(data)

    with pytest.raises(records.RecordError, match=records.KEEPING_NAME):
        records.read_keeping(tmp_path)
    record(tmp_path, cold="/cold")

    found = records.read_keeping(tmp_path)
    assert found is not None
    assert [place.where for place in found.places] == ["/cold"]


def test_prune_goes_by_the_rules_of_the_runs_script(command: Command, run: RunDirectory) -> None:
    build.make_steps(run, 5)
    record(run.path, attempt=3)

    dry = command("checkpoints", "prune", run.path, "--dry-run")
    assert "newest 2 (of the run's script, launch 3.0)" in dry.out
    assert dry.out.count("would be removed") == 3
    document = json.loads(command("checkpoints", "prune", run.path, "--json").out)

    assert (document["rules"], document["removed"]) == ("newest 2", [f"step_00000{n}00" for n in (1, 2, 3)])
    named = json.loads(command("checkpoints", "prune", run.path, "--retention", "newest 1", "--json").out)
    assert (named["rules_of"], named["removed"]) == ("named here", ["step_00000400"])


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (None, "no launch of this run has recorded its rules"),
        (b"{", "cannot be read"),
        ({"keep_last": 0}, "keep_last is below 1"),
        ({"keep_lots": 3}, "keep_lots"),
        ("all", "the run's script keeps all steps (launch 0.0)"),
    ],
)
def test_prune_removes_nothing_by_rules_that_it_does_not_know(
    command: Command, run: RunDirectory, data: bytes | str | dict[str, int] | None, problem: str
) -> None:
    steps = build.make_steps(run, 5)
    if isinstance(data, bytes):
        (run.path / records.KEEPING_NAME).write_bytes(data)
    elif data is not None:
        record(run.path, retention=None if isinstance(data, str) else {**data})

    said = command("checkpoints", "prune", run.path)

    assert said.code == 2
    assert problem in said.err
    assert "--retention" in said.err
    assert all(step.is_dir() for step in steps)


@pytest.mark.parametrize(
    "text",
    ["newest 3", "newest 2, every 1000 steps", "newest 3, every 2.5 percent, epoch ends, best val_loss 2 highest"],
)
def test_rules_are_said_as_a_script_says_them(text: str) -> None:
    policy = parse_policy(text, total_steps=100)
    assert policy is not None

    assert rules_in_words(policy) == text
    assert parse_policy(rules_in_words(Policy())) == Policy()


def test_tiers_shows_the_places_that_only_the_script_names(command: Command, run: RunDirectory, tmp_path: Path) -> None:
    build.make_steps(run, 2)
    record(run.path, attempt=0, cold=str(tmp_path / "old"))
    record(run.path, attempt=1, cold=str(tmp_path / "cold"))
    assert command("checkpoints", "copy", run.path, "--step", "100", "--to", tmp_path / "cold").code == 0

    document = json.loads(command("checkpoints", "tiers", run.path, "--json").out)
    said = command("checkpoints", "tiers", run.path)

    assert [(tier["kind"], tier["newest"]) for tier in document["tiers"]] == [("shared", 200), ("cold", 100)]
    assert document["used_earlier"] == [{"kind": "cold", "where": str(tmp_path / "old"), "launch": "0.0"}]
    assert f"used by launch 0.0: {tmp_path}/old; look there with --cold" in said.out


def test_what_the_settings_of_the_newest_attempt_name_counts_for_tiers(
    command: Command, run: RunDirectory, tmp_path: Path
) -> None:
    build.make_steps(run, 1)
    record(run.path, cold=str(tmp_path / "of-the-script"))
    attempt = run.path / "attempts" / "attempt-001"
    attempt.mkdir(parents=True)
    settings = {"local_tier": {"value": None}, "cold_tier": {"value": str(tmp_path / "told")}}
    (attempt / "config.json").write_text(json.dumps({"format": 1, "settings": settings}))

    document = json.loads(command("checkpoints", "tiers", run.path, "--json").out)

    assert [tier["name"] for tier in document["tiers"]] == [str(run.checkpoints), str(tmp_path / "told")]
    assert [place["where"] for place in document["used_earlier"]] == [str(tmp_path / "of-the-script")]
